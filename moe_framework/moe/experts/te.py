"""The experts through Transformer Engine: GroupedLinear → ScaledSwiGLU → GroupedLinear, in bf16 or FP8.

Transformer Engine wants one registered parameter per expert; the framework has one stacked weight, gathered by FSDP
for the time of a layer. So the operations keep empty parameters of their own, which each call points at the slices
of the stacked weight, and the call is wrapped in an autograd function that takes and gives stacked tensors: nothing
is copied, and the gradient that reaches the DTensor is the buffer that Transformer Engine wrote.

Source: Transformer Engine 2.20, `transformer_engine.pytorch.ops`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from moe_framework.errors import DependencyError
from moe_framework.precision.recipes import TeRecipe


class TransformerEngineExperts:
    """One layer's experts in Transformer Engine; an `ExpertBackend`. Syncs with the host for the split sizes.

    Args:
        num_local_experts: Experts e of this rank.
        hidden_size: D.
        intermediate_size: F.
        recipe: How to quantize; None for bf16.

    Raises:
        DependencyError: transformer_engine cannot be imported.
    """

    def __init__(self, *, num_local_experts: int, hidden_size: int, intermediate_size: int, recipe: TeRecipe | None):
        self._te, ops = _import_te()
        self._recipe = recipe
        make = _module_mlp if recipe is not None and recipe.needs_module else _ops_mlp
        self._fc1, self._fc2, self._mlp = make(self._te, ops, num_local_experts, hidden_size, intermediate_size)

    def __call__(
        self, gate_up: Tensor, down: Tensor, rows_RD: Tensor, probs_R: Tensor, tokens_per_expert: Tensor
    ) -> Tensor:
        """Apply the experts; see `ExpertBackend`."""
        if self._recipe is None:
            return self._apply(gate_up, down, rows_RD, probs_R, tokens_per_expert)
        padding = _Padding(tokens_per_expert, self._recipe.row_alignment)
        out = self._apply(gate_up, down, padding.pad(rows_RD), padding.pad(probs_R), padding.padded_counts)
        return padding.unpad(out)

    def _apply(self, gate_up: Tensor, down: Tensor, rows: Tensor, probs: Tensor, counts: Tensor) -> Tensor:
        if rows.shape[0] == 0:
            # Nothing to multiply; the sum keeps every weight in the graph, with a gradient of zeros.
            return rows + 0.0 * (gate_up.sum() + down.sum() + probs.sum()).to(rows.dtype)
        if torch.is_grad_enabled():
            return _StackedWeights.apply(self, gate_up, down, rows, probs, counts)  # pyright: ignore
        return self.run(gate_up, down, rows, probs, counts)

    def run(self, gate_up: Tensor, down: Tensor, rows: Tensor, probs: Tensor, counts: Tensor) -> Tensor:
        """Call the operations on the slices of stacked weights; gradients end in `weights`."""
        for op, stacked in ((self._fc1, gate_up), (self._fc2, down)):
            for parameter, weight in zip(op.parameters(), stacked.unbind(0), strict=True):
                parameter.data = weight
        with self._autocast():
            return self._mlp(rows, counts, probs)

    def weights(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The operations' own parameters, per layer of the MLP."""
        return list(self._fc1.parameters()), list(self._fc2.parameters())

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
        keep = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.enable_grad(), keep:
            leaves = rows.detach().requires_grad_(), probs.detach().requires_grad_()
            out = experts.run(gate_up.detach(), down.detach(), *leaves, counts)
        ctx.experts, ctx.leaves, ctx.out = experts, leaves, out
        return out.detach()

    @staticmethod
    def backward(ctx, grad_out):  # pyright: ignore[reportIncompatibleMethodOverride]
        fc1, fc2 = ctx.experts.weights()
        inputs = [*ctx.leaves, *fc1, *fc2]
        grad_rows, grad_probs, *grads = torch.autograd.grad(ctx.out, inputs, grad_out.contiguous())
        ctx.leaves = ctx.out = None  # attributes, unlike saved tensors, would live as long as the graph
        return None, _stacked(grads[: len(fc1)]), _stacked(grads[len(fc1) :]), grad_rows, grad_probs, None


def _stacked(grads: list[Tensor]) -> Tensor:
    """The gradients as one tensor, without a copy where they are consecutive slices of one buffer."""
    first = grads[0]
    storage, size = first.untyped_storage(), first.numel()
    consecutive = all(
        grad.untyped_storage().data_ptr() == storage.data_ptr()
        and grad.is_contiguous()
        and grad.storage_offset() == first.storage_offset() + index * size
        for index, grad in enumerate(grads)
    )
    if not consecutive:
        return torch.stack(grads)
    return first.as_strided((len(grads), *first.shape), (size, *first.stride()))


class _Padding:
    """Rows of zeros after each expert's, so that its number of rows is a multiple of what the format needs.

    Zeros add nothing to any product, and their results are dropped.
    """

    def __init__(self, tokens_per_expert: Tensor, alignment: int):
        counts = tokens_per_expert
        self.padded_counts = (counts + alignment - 1) // alignment * alignment
        shift = (self.padded_counts - counts).cumsum(0) - (self.padded_counts - counts)
        num_rows, self._num_padded = torch.stack([counts.sum(), self.padded_counts.sum()]).tolist()
        self._place = torch.arange(num_rows, device=counts.device) + torch.repeat_interleave(
            shift, counts, output_size=num_rows
        )

    def pad(self, x: Tensor) -> Tensor:
        return x.new_zeros(self._num_padded, *x.shape[1:]).index_copy(0, self._place, x)

    def unpad(self, x: Tensor) -> Tensor:
        return x.index_select(0, self._place)


_Mlp = Callable[[Tensor, Tensor, Tensor], Tensor]


def _ops_mlp(te, ops, num_experts: int, width: int, inner: int) -> tuple[nn.Module, nn.Module, _Mlp]:
    """The MLP as fusible operations: faster, for every recipe but FP8 with block scales."""
    fc1 = _without_storage(ops.GroupedLinear(num_experts, width, 2 * inner, bias=False, device="meta"))
    fc2 = _without_storage(ops.GroupedLinear(num_experts, inner, width, bias=False, device="meta"))
    sequence = ops.Sequential(fc1, ops.ScaledSwiGLU(), fc2)
    return fc1, fc2, lambda rows, counts, probs: sequence(rows, counts, probs, counts)


def _module_mlp(te, ops, num_experts: int, width: int, inner: int) -> tuple[nn.Module, nn.Module, _Mlp]:
    """The MLP as modules. The operations of 2.20 ask cuBLAS for an accumulation that block scales do not have."""
    from moe_framework.moe.kernels.swiglu import fused_scaled_swiglu

    options = {"bias": False, "params_dtype": torch.bfloat16, "device": "meta"}
    fc1 = _without_storage(te.GroupedLinear(num_experts, width, 2 * inner, **options))
    fc2 = _without_storage(te.GroupedLinear(num_experts, inner, width, **options))

    def mlp(rows: Tensor, counts: Tensor, probs: Tensor) -> Tensor:
        splits = counts.cpu()
        return fc2(fused_scaled_swiglu(fc1(rows, splits), probs), splits)

    return fc1, fc2, mlp


def _without_storage(op: nn.Module) -> nn.Module:
    for name, parameter in list(op.named_parameters(recurse=False)):
        empty = torch.empty(0, dtype=torch.bfloat16, device="cuda")
        op.register_parameter(name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    return op


def _import_te():
    try:
        import transformer_engine.pytorch as te  # pyright: ignore[reportMissingImports]
        from transformer_engine.pytorch import ops  # pyright: ignore[reportMissingImports]
    except Exception as error:  # a broken installation raises more than ImportError
        raise DependencyError(
            f"experts.backend=te needs transformer_engine, which failed to import ({type(error).__name__}: {error}). "
            "Install '.[te]' or set experts.backend=auto."
        ) from error
    return te, ops
