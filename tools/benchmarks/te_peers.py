"""Transformer Engine's experts as a user would write them, with weights of their own: peers of our backends."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_framework.errors import DependencyError
from moe_framework.precision.recipes import RECIPES
from tools.benchmarks.experts import ExpertsCase

KINDS = ("te.ops", "te.GroupedLinear")


def te_peer(kind: str, mode: str, case: ExpertsCase, counts: Tensor) -> Callable[[], object]:
    """Make a peer and its rows, which are padded already where the format needs it: that favours the peer.

    Args:
        kind: `te.ops`: GroupedLinear, ScaledSwiGLU and GroupedLinear in a Sequential; `te.GroupedLinear`: the
            modules, with silu(gate)·up·prob of torch in between.
        mode: `bf16`, or a key of `RECIPES`.
        case: Sizes and seed.
        counts: [E] int64 on a CUDA device; rows of each expert.

    Returns:
        One forward and backward pass.

    Raises:
        DependencyError: Transformer Engine cannot be imported.
    """
    try:
        import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]
        from transformer_engine.pytorch import ops  # pyright: ignore[reportMissingImports]
    except Exception as error:  # a broken installation raises more than ImportError
        raise DependencyError(
            f"{kind}:{mode} needs transformer_engine, which failed to import ({type(error).__name__}). "
            "Install '.[te]' or leave it out."
        ) from error
    recipe = None if mode == "bf16" else RECIPES[mode]
    alignment = 1 if recipe is None else recipe.row_alignment
    padded = (counts + alignment - 1) // alignment * alignment
    num_rows, device = int(padded.sum()), counts.device
    generator = torch.Generator(device).manual_seed(case.seed)

    def draw() -> Tensor:
        return torch.randn(num_rows, case.hidden_size, generator=generator, device=device, dtype=torch.bfloat16)

    rows, cotangent = draw().requires_grad_(), draw()
    probs = torch.rand(num_rows, generator=generator, device=device).requires_grad_()
    parameters, mlp = _ops(ops, case, padded) if kind == "te.ops" else _modules(te, case, padded)

    def forward_backward() -> None:
        for tensor in (rows, probs, *parameters):
            tensor.grad = None
        with te.autocast(enabled=recipe is not None, recipe=None if recipe is None else recipe.make()):
            out = mlp(rows, probs)
        out.backward(cotangent)

    return forward_backward


_Mlp = Callable[[Tensor, Tensor], Tensor]


def _ops(ops: Any, case: ExpertsCase, counts: Tensor) -> tuple[list[Tensor], _Mlp]:
    options = {"bias": False, "dtype": torch.bfloat16, "device": counts.device}
    experts, width, inner = case.num_experts, case.hidden_size, case.intermediate_size
    sequence = ops.Sequential(
        ops.GroupedLinear(experts, width, 2 * inner, **options),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(experts, inner, width, **options),
    )
    return list(sequence.parameters()), lambda rows, probs: sequence(rows, counts, probs, counts)


def _modules(te: Any, case: ExpertsCase, counts: Tensor) -> tuple[list[Tensor], _Mlp]:
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": counts.device}
    experts, width, inner = case.num_experts, case.hidden_size, case.intermediate_size
    fc1 = te.GroupedLinear(experts, width, 2 * inner, **options)
    fc2 = te.GroupedLinear(experts, inner, width, **options)
    splits = counts.tolist()

    def mlp(rows: Tensor, probs: Tensor) -> Tensor:
        gate, up = fc1(rows, m_splits=splits).chunk(2, -1)
        return fc2(F.silu(gate) * up * probs.to(up.dtype)[:, None], m_splits=splits)

    return [*fc1.parameters(), *fc2.parameters()], mlp
