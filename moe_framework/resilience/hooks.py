"""Makes a model mark its progress: hooks on the decoder and its blocks, and a watch around each dispatcher.

They only note the time and the place: no tensor is read, changed or kept, and no module that torch.compile traces
has a hook, so that graphs and numbers stay as they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_framework.model.block import Block
from moe_framework.model.decoder import Decoder
from moe_framework.moe.dispatch.all_to_all import AllToAllHandle
from moe_framework.moe.dispatch.base import Dispatched, TokenDispatcher
from moe_framework.moe.dispatch.width import WidthHandle
from moe_framework.resilience.marks import MarkLog


def watch_model(model: Decoder, log: MarkLog) -> Callable[[], None]:
    """Let a model mark its progress.

    Args:
        model: Parallelised, so that a layer's marks come before FSDP gathers its parameters.
        log: Takes the marks.

    Returns:
        Takes the hooks away again.
    """
    undo = [
        model.register_forward_pre_hook(lambda *_: log.begin_forward(), prepend=True).remove,
        model.register_forward_hook(lambda *_: log.end_forward()).remove,
    ]
    for layer, block in enumerate(model.layers):
        assert isinstance(block, Block)
        undo += _watch_block(block, layer, log)
    return lambda: [take_away() for take_away in undo].clear()


def _watch_block(block: Block, layer: int, log: MarkLog) -> list[Callable[[], Any]]:
    def ends(_module: nn.Module, _inputs: tuple, output: tuple[Tensor, Any]) -> None:
        log.forward(layer, "end of block")
        _when_gradient_arrives(output[0], log, layer, "block")

    undo = [
        block.register_forward_pre_hook(lambda *_: log.forward(layer, "block"), prepend=True).remove,
        # Before FSDP's own, whose hook on the same gradient gathers the parameters.
        block.register_forward_hook(ends, prepend=True).remove,
        block.moe.register_forward_pre_hook(lambda *_: log.forward(layer, "router"), prepend=True).remove,
        partial(setattr, block.moe, "dispatcher", block.moe.dispatcher),
    ]
    if not is_compiled(block.attention):
        mark = block.attention.register_forward_pre_hook(lambda *_: log.forward(layer, "attention"), prepend=True)
        undo.append(mark.remove)
    block.moe.dispatcher = WatchedDispatcher(block.moe.dispatcher, layer, log)
    return undo


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of the module runs what `module.compile()` made (torch 2.11 keeps it there)."""
    return getattr(module, "_compiled_call_impl", None) is not None


class WatchedDispatcher:
    """Marks when tokens leave and come back, and how many.

    Args:
        inner: The dispatcher that carries them.
        layer: Its layer.
        log: Takes the marks.
    """

    def __init__(self, inner: TokenDispatcher, layer: int, log: MarkLog):
        self.inner = inner
        self.layer = layer
        self.log = log

    def dispatch(self, x_TD: Tensor, probs_TK: Tensor, experts_TK: Tensor) -> Dispatched:
        """Dispatch; see `TokenDispatcher.dispatch`.

        Collective: those of the inner dispatcher.
        """
        log, layer = self.log, self.layer
        log.forward(layer, "dispatch")
        dispatched = self.inner.dispatch(x_TD, probs_TK, experts_TK)
        splits = _splits(dispatched.handle)
        if splits is not None:
            log.exchanged(layer, *splits)
        log.forward(layer, "experts")
        _when_gradient_arrives(dispatched.rows_RD, log, layer, "dispatch")
        return dispatched

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Combine; see `TokenDispatcher.combine`.

        Collective: those of the inner dispatcher.
        """
        log, layer = self.log, self.layer
        log.forward(layer, "combine")
        y_TD = self.inner.combine(rows_RD, handle)
        log.forward(layer, "balancing")
        _when_gradient_arrives(rows_RD, log, layer, "experts")
        _when_gradient_arrives(y_TD, log, layer, "combine")
        return y_TD


def _when_gradient_arrives(tensor: Tensor, log: MarkLog, layer: int, activity: str) -> None:
    """Mark when backward has a tensor's gradient; a recomputed tensor never gets one."""
    if tensor.requires_grad and not log.in_backward:
        tensor.register_hook(lambda _: log.backward(layer, activity))


def _splits(handle: Any) -> tuple[list[int], list[int]] | None:
    if isinstance(handle, WidthHandle):
        handle = handle.inner
    return (handle.input_splits, handle.output_splits) if isinstance(handle, AllToAllHandle) else None
