"""Named ranges around the parts of a decoder, put there from outside, so that the model knows nothing of them.

FSDP's hooks run before and after a module's `forward`, so what they launch stays outside the module's range.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.profiler import record_function

from moe_framework.model.attention import Attention
from moe_framework.model.decoder import Decoder
from moe_framework.moe.experts.layer import GroupedExperts
from moe_framework.moe.layer import MoELayer
from moe_framework.moe.router import TopKRouter

PREFIX = "part:"
STEP = PREFIX + "step"

EXPERTS = "experts"
ROUTER = "router and balancing"
PERMUTATION = "permutation"
EXCHANGE = "token exchange"
ATTENTION = "attention"
HEAD = "head and loss"
OPTIMIZER = "optimizer"
SHARDING = "FSDP copies and communication"
OTHER = "norms, residuals, embedding"
PARTS = (EXPERTS, ROUTER, PERMUTATION, EXCHANGE, ATTENTION, HEAD, OPTIMIZER, SHARDING, OTHER)

# The innermost range counts. A MoE layer without its router and its experts is the permutation.
_PART_OF_MODULE = (
    (GroupedExperts, EXPERTS),
    (TopKRouter, ROUTER),
    (MoELayer, PERMUTATION),
    (Attention, ATTENTION),
    (Decoder, OTHER),
)


@contextlib.contextmanager
def ranges_around_parts(model: Decoder) -> Iterator[None]:
    """Put a range around each part's forward pass for the time of the block.

    Args:
        model: Parallelised or not, compiled in parts or not.
    """
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            part = next((name for kind, name in _PART_OF_MODULE if isinstance(module, kind)), None)
            if part is not None:
                undo.enter_context(_wrapped(module, _what_a_call_runs(module), _in_range(part)))
            if isinstance(module, MoELayer):
                undo.enter_context(_wrapped(module, "balancing", _in_range(ROUTER)))
        undo.enter_context(_head_and_loss(model))
        yield


@contextlib.contextmanager
def _head_and_loss(model: Decoder) -> Iterator[None]:
    """From the final norm to the end of the forward pass: the head, and a loss that may be no module."""
    open_ranges: list[record_function] = []

    def opening(function: Callable) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            open_ranges.append(record_function(PREFIX + HEAD))
            open_ranges[-1].__enter__()
            return function(*args, **kwargs)

        return wrapped

    def closing(function: Callable) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                while open_ranges:
                    open_ranges.pop().__exit__(None, None, None)

        return wrapped

    with (
        _wrapped(model.norm, _what_a_call_runs(model.norm), opening),
        _wrapped(model, _what_a_call_runs(model), closing),
    ):
        yield


def _in_range(part: str) -> Callable[[Callable], Callable]:
    def wrap(function: Callable) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with record_function(PREFIX + part):
                return function(*args, **kwargs)

        return wrapped

    return wrap


@contextlib.contextmanager
def _wrapped(module: nn.Module, name: str, wrap: Callable[[Callable], Callable]) -> Iterator[None]:
    """Replace a callable attribute by a wrapped one, of this object alone."""
    missing = object()
    before = module.__dict__.get(name, missing)
    object.__setattr__(module, name, wrap(getattr(module, name)))
    try:
        yield
    finally:
        if before is missing:
            object.__delattr__(module, name)
        else:
            object.__setattr__(module, name, before)


def _what_a_call_runs(module: nn.Module) -> str:
    """A module on which `compile()` was called runs its compiled call, hooks included, instead of `forward`."""
    return "_compiled_call_impl" if _is_compiled(module) else "forward"


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None
