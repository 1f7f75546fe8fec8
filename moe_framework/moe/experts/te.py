"""The experts through Transformer Engine: GroupedLinear → ScaledSwiGLU → GroupedLinear, in bf16 or FP8.

Transformer Engine wants one registered parameter per expert; the framework has one stacked weight, gathered by FSDP
for the time of a layer. So the operations keep empty parameters of their own, which each call points at the slices
of the stacked weight, and the call is wrapped in an autograd function that takes and gives stacked tensors: nothing
is copied, and the gradient that reaches the DTensor is the buffer that Transformer Engine wrote, in its dtype.

Source: Transformer Engine 2.20, `transformer_engine.pytorch.ops`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from moe_framework.distributed.runtime import request_te_fusion
from moe_framework.errors import DependencyError
from moe_framework.moe.counts import HostCounts
from moe_framework.moe.experts import fused_mxfp8
from moe_framework.moe.experts.fused_mxfp8 import FUSED, PLAIN, Arrangement
from moe_framework.moe.experts.padding import GroupPadding
from moe_framework.precision.recipes import TeRecipe


class TransformerEngineExperts:
    """One layer's experts in Transformer Engine; an `ExpertBackend`. Syncs once with the host, for the split sizes.

    Args:
        num_local_experts: Experts e of this rank.
        hidden_size: D.
        intermediate_size: F.
        recipe: How to quantize; None for bf16.
        arrangement: How weights and rows are laid out for the operations; None for what is fastest here.

    Raises:
        DependencyError: transformer_engine cannot be imported.
    """

    def __init__(
        self,
        *,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        recipe: TeRecipe | None,
        arrangement: Arrangement | None = None,
    ):
        self._te, ops = import_te()
        self._recipe = recipe
        self._arrangement = arrangement or _fastest_arrangement(recipe, hidden_size, intermediate_size)
        sizes = (num_local_experts, hidden_size, intermediate_size)
        if recipe is not None and recipe.needs_module:
            self._operations: Any = None
            self._fc1, self._fc2, self._mlp = _module_mlp(self._te, *sizes)
        else:
            self._operations = _operations(ops, *sizes, self._arrangement.interleave)
            self._fc1, self._fc2 = self._operations[0], self._operations[2]
            self._mlp = self._run_operations

    def __call__(
        self, gate_up: Tensor, down: Tensor, rows_RD: Tensor, probs_R: Tensor, tokens_per_expert: Tensor
    ) -> Tensor:
        """Apply the experts; see `ExpertBackend`."""
        if self._arrangement.interleave is not None:
            gate_up = fused_mxfp8.interleave_gate_up(gate_up, self._arrangement.interleave)
        alignment = max(self._arrangement.row_alignment, 1 if self._recipe is None else self._recipe.row_alignment)
        if alignment == 1:
            return self._apply(gate_up, down, rows_RD, probs_R, HostCounts.of(tokens_per_expert))
        padding = GroupPadding(tokens_per_expert, alignment)
        out = self._apply(gate_up, down, padding.pad(rows_RD), padding.pad(probs_R), padding.padded_counts)
        return padding.unpad(out)

    def _apply(self, gate_up: Tensor, down: Tensor, rows: Tensor, probs: Tensor, counts: Tensor) -> Tensor:
        if rows.shape[0] == 0:
            # Nothing to multiply; the sum keeps every weight in the graph, with a gradient of zeros.
            return rows + 0.0 * (gate_up.sum() + down.sum() + probs.sum()).to(rows.dtype)
        if torch.is_grad_enabled():
            return _StackedWeights.apply(self, gate_up, down, rows, probs, counts)  # pyright: ignore
        return self.run(gate_up.to(rows.dtype), down.to(rows.dtype), rows, probs, counts)

    def run(self, gate_up: Tensor, down: Tensor, rows: Tensor, probs: Tensor, counts: Tensor) -> Tensor:
        """Call the operations on the slices of stacked weights; gradients end in `weights`."""
        for op, stacked in ((self._fc1, gate_up), (self._fc2, down)):
            for parameter, weight in zip(op.parameters(), stacked.unbind(0), strict=True):
                parameter.data = weight
        with self._autocast():
            out = self._mlp(rows, counts, probs)
        if self._recipe is not None:
            # Backward uses the quantized copies; those in bf16 need not live until then.
            for parameter in (*self._fc1.parameters(), *self._fc2.parameters()):
                parameter.data = parameter.data.new_empty(0)
        if self._arrangement is FUSED and self._recipe is not None and self._recipe.fusible and not self.is_fused():
            fused_mxfp8.warn_unfused()
        return out

    def is_fused(self) -> bool:
        """Whether the last forward pass was one fused operation."""
        return fused_mxfp8.is_fused(self._operations)

    def weights(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The operations' own parameters, per layer of the MLP."""
        return list(self._fc1.parameters()), list(self._fc2.parameters())

    def _run_operations(self, rows: Tensor, counts: Tensor, probs: Tensor) -> Tensor:
        # One tensor of counts for both layers: the fused operation refuses two, even if they are equal.
        return self._operations(rows, counts, probs, counts)

    def _autocast(self) -> AbstractContextManager:
        if self._recipe is None:
            return nullcontext()
        return self._te.autocast(enabled=True, recipe=self._recipe.make())


class _StackedWeights(torch.autograd.Function):
    """Runs the operations on stacked weights, and stacks the weight gradients that they produce."""

    @staticmethod
    def forward(ctx, experts, gate_up, down, rows, probs, counts):
        # Activation checkpointing hooks every tensor that is saved, to recompute it in backward. The backward pass
        # below is one of its own, for which torch would recompute the whole block a second time and fail: so what
        # Transformer Engine saves is kept.
        # A hook gets a plain alias of the counts, which Transformer Engine would read from the device in backward.
        def keep(tensor: Tensor) -> Tensor:
            return counts if tensor.data_ptr() == counts.data_ptr() else tensor

        keep_saved = torch.autograd.graph.saved_tensors_hooks(keep, keep)
        with torch.enable_grad(), keep_saved:
            leaves = rows.detach().requires_grad_(), probs.detach().requires_grad_()
            out = experts.run(gate_up.detach().to(rows.dtype), down.detach().to(rows.dtype), *leaves, counts)
        ctx.experts, ctx.leaves, ctx.out = experts, leaves, out
        ctx.like = torch.empty_like(gate_up, device="meta"), torch.empty_like(down, device="meta")
        return out.detach()

    @staticmethod
    def backward(ctx, grad_out):  # pyright: ignore[reportIncompatibleMethodOverride]
        fc1, fc2 = ctx.experts.weights()
        # The products write the gradients where they are wanted, stacked and in the stacked weight's dtype.
        grad_gate_up, grad_down = (torch.empty_like(like, device=grad_out.device) for like in ctx.like)
        for parameter, buffer in zip([*fc1, *fc2], [*grad_gate_up, *grad_down], strict=True):
            parameter.main_grad = buffer
        inputs = [*ctx.leaves, *fc1, *fc2]
        grad_rows, grad_probs, *_ = torch.autograd.grad(ctx.out, inputs, grad_out.contiguous(), allow_unused=True)
        for parameter in (*fc1, *fc2):
            parameter.main_grad = parameter.main_grad.new_empty(0)
        ctx.leaves = ctx.out = None  # attributes, unlike saved tensors, would live as long as the graph
        return None, grad_gate_up, grad_down, grad_rows, grad_probs, None


_Mlp = Callable[[Tensor, Tensor, Tensor], Tensor]


def _fastest_arrangement(recipe: TeRecipe | None, hidden_size: int, intermediate_size: int) -> Arrangement:
    if recipe is None or not recipe.fusible:
        return PLAIN
    obstacles = fused_mxfp8.fused_mxfp8_obstacles(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        setting=fused_mxfp8.fusion_setting(torch.cuda.get_device_capability()),
    )
    fused_mxfp8.log_arrangement(tuple(obstacles))
    return PLAIN if obstacles else FUSED


def _operations(ops, num_experts: int, width: int, inner: int, interleave: int | None) -> Any:
    """The MLP as fusible operations: faster, for every recipe but FP8 with block scales."""
    options = {"bias": False, "device": "meta", "accumulate_into_main_grad": True}
    fc1 = _without_storage(ops.GroupedLinear(num_experts, width, 2 * inner, **options))
    fc2 = _without_storage(ops.GroupedLinear(num_experts, inner, width, **options))
    return ops.Sequential(fc1, ops.ScaledSwiGLU(glu_interleave_size=interleave), fc2)


def _module_mlp(te, num_experts: int, width: int, inner: int) -> tuple[nn.Module, nn.Module, _Mlp]:
    """The MLP as modules. The operations of 2.20 ask cuBLAS for an accumulation that block scales do not have."""
    from moe_framework.moe.kernels.swiglu import fused_scaled_swiglu

    options = {
        "bias": False,
        "params_dtype": torch.bfloat16,
        "device": "meta",
        "fuse_wgrad_accumulation": True,
    }
    fc1 = _without_storage(te.GroupedLinear(num_experts, width, 2 * inner, **options))
    fc2 = _without_storage(te.GroupedLinear(num_experts, inner, width, **options))

    def mlp(rows: Tensor, counts: Tensor, probs: Tensor) -> Tensor:
        splits = counts.cpu()
        return fc2(fused_scaled_swiglu(fc1(rows, splits), probs), splits)

    return fc1, fc2, mlp


def _without_storage(op: nn.Module) -> nn.Module:
    for name, parameter in list(op.named_parameters(recurse=False)):
        empty = torch.empty(0, dtype=torch.bfloat16, device="cuda")
        weight = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        # Forward refuses a weight without a buffer; the one that backward writes is made there.
        weight.main_grad = empty  # pyright: ignore[reportAttributeAccessIssue]
        weight.overwrite_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
        op.register_parameter(name, weight)
    return op


def import_te() -> tuple[Any, Any]:
    """Import Transformer Engine, with its fused operations asked for.

    Returns:
        `transformer_engine.pytorch` and its `ops`.

    Raises:
        DependencyError: It is missing or broken; the cause is what the import raised.
    """
    request_te_fusion()
    try:
        import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]
        from transformer_engine.pytorch import ops  # pyright: ignore[reportMissingImports]
    except Exception as error:  # a broken installation raises more than ImportError
        raise DependencyError(
            f"experts.backend=te needs transformer_engine, which failed to import ({type(error).__name__}: {error}). "
            "Install '.[te]' or set experts.backend=auto."
        ) from error
    return te, ops
