"""The experts in FP8, one dense product of torch after another: for a few large experts on Hopper.

Scales and formats are those of Transformer Engine's `Float8CurrentScaling`: one scale per expert for its rows and one
for its weight, from their largest value; E4M3 forward, E5M2 for gradients; backward's products leave the tensor cores'
short accumulators early. What differs is what stands around the products: `fp8_rows.py` casts the rows of all experts
at once, computes SwiGLU on the way and pads no group, and reads float32 weights as they are.

Backward needs the weights transposed, so that a copy of them, one byte each, lives from forward to backward, also where
FSDP frees what it gathered; `train.activation_checkpointing=full` makes it anew instead.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_framework.moe.experts.fp8_rows import (
    GRADIENTS,
    VALUES,
    cast_rows,
    cast_swiglu,
    cast_swiglu_gradient,
    transposed_groups,
)

# D and F must be multiples of this: the products' summed dimensions in bytes.
WIDTH_ALIGNMENT = 16


def scaled_mm_experts(
    gate_up: Tensor, down: Tensor, rows_RD: Tensor, probs_R: Tensor, tokens_per_expert: Tensor
) -> Tensor:
    """Apply the experts; see `ExpertBackend`. D and F are multiples of `WIDTH_ALIGNMENT`. Waits for the counts."""
    # Inside, grad mode is off, and the inputs' own flags say nothing of it.
    learning = torch.is_grad_enabled()
    return _Experts.apply(gate_up, down, rows_RD, probs_R, tokens_per_expert, learning)  # pyright: ignore


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, down, rows_RD, probs_R, counts_e, learning):
        gate_up_8, gate_up_t, gate_up_factors = _cast_weight(gate_up, transposed=learning)
        down_8, down_t, down_factors = _cast_weight(down, transposed=learning)
        rows_8 = cast_rows(rows_RD, counts_e, VALUES, transposed=learning)
        counts, dtype = counts_e.tolist(), rows_RD.dtype
        gate_up_R2F = scaled_products(rows_8.rows, rows_8.factors, gate_up_8, gate_up_factors, counts, dtype, True)
        hidden_8 = cast_swiglu(gate_up_R2F, probs_R, counts_e, transposed=learning)
        out_RD = scaled_products(hidden_8.rows, hidden_8.factors, down_8, down_factors, counts, dtype, True)
        if learning:
            weights = gate_up_t, gate_up_factors, down_t, down_factors
            values = rows_8.transposed, rows_8.factors, hidden_8.transposed, hidden_8.factors
            ctx.save_for_backward(gate_up_R2F, probs_R, counts_e, *weights, *values)
            ctx.counts, ctx.weight_dtype = counts, gate_up.dtype
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD):  # pyright: ignore[reportIncompatibleMethodOverride]
        gate_up_R2F, probs_R, counts_e, gate_up_t, gate_up_factors, down_t, down_factors, *values = ctx.saved_tensors
        rows_t, row_factors, hidden_t, hidden_factors = values
        counts, dtype, weight_dtype = ctx.counts, grad_RD.dtype, ctx.weight_dtype
        grad_8 = cast_rows(grad_RD, counts_e, GRADIENTS)
        grad_RF = scaled_products(grad_8.rows, grad_8.factors, down_t, down_factors, counts, dtype, False)
        shape = down_t.shape[0], down_t.shape[2], down_t.shape[1]
        grad_down = _weight_gradients(grad_8, hidden_t, hidden_factors, counts, shape, weight_dtype)
        grad_8, grad_probs_R = cast_swiglu_gradient(grad_RF, gate_up_R2F, probs_R, counts_e)
        del grad_RF
        grad_rows = scaled_products(grad_8.rows, grad_8.factors, gate_up_t, gate_up_factors, counts, dtype, False)
        shape = gate_up_t.shape[0], gate_up_t.shape[2], gate_up_t.shape[1]
        grad_gate_up = _weight_gradients(grad_8, rows_t, row_factors, counts, shape, weight_dtype)
        return grad_gate_up, grad_down, grad_rows, grad_probs_R, None, None


def _cast_weight(weight: Tensor, *, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight [e, N, K] in FP8, its transposed [e, K, N] (empty where not asked for), and its factors."""
    num_experts, out_width, width = weight.shape
    assert out_width % WIDTH_ALIGNMENT == width % WIDTH_ALIGNMENT == 0, "backend_obstacles refuses other widths"
    counts = torch.full((num_experts,), out_width, device=weight.device)
    cast = cast_rows(weight.flatten(0, 1), counts, VALUES, transposed=transposed)
    flat = cast.transposed[: weight.numel()]
    return cast.rows.view_as(weight), flat.view(-1, width, out_width), cast.factors


# An operator of its own, so that activation checkpointing can keep its result.
@torch.library.custom_op("moe_framework::scaled_products", mutates_args=())
def scaled_products(
    rows: Tensor,
    row_factors: Tensor,
    weights: Tensor,
    weight_factors: Tensor,
    counts: Sequence[int],
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Multiply each expert's rows by its matrix, both in FP8.

    Args:
        rows: [R, K] FP8; the rows of expert 0 first.
        row_factors: [e, 4] float32; the first of each is its rows' factor.
        weights: [e, N, K] FP8, contiguous.
        weight_factors: [e, 4] float32.
        counts: Rows of each expert.
        dtype: Of the result.
        fast: Sum in the tensor cores' accumulators alone, which keep about 14 bits.

    Returns:
        [R, N].
    """
    out = torch.empty(rows.shape[0], weights.shape[1], dtype=dtype, device=rows.device)
    for a, b, result, *factors in zip(
        rows.split(list(counts)), weights, out.split(list(counts)), row_factors, weight_factors, strict=True
    ):
        if a.shape[0]:
            _product(a, b, factors, result, fast)
    return out


@scaled_products.register_fake
def _(rows, row_factors, weights, weight_factors, counts, dtype, fast):
    return torch.empty(rows.shape[0], weights.shape[1], dtype=dtype, device=rows.device)


def _weight_gradients(grad_8, values_t: Tensor, value_factors: Tensor, counts, shape, dtype: torch.dtype) -> Tensor:
    """Multiply each expert's transposed gradients and values: [e, N, K]; zeros where it has no rows."""
    out = torch.empty(shape, dtype=dtype, device=values_t.device)
    groups = transposed_groups(grad_8.transposed, shape[1], counts), transposed_groups(values_t, shape[2], counts)
    for a, b, result, *factors in zip(*groups, out, grad_8.factors, value_factors, strict=True):
        if a.shape[1]:
            _product(a, b, factors, result, fast=False)
        else:
            result.zero_()
    return out


def _product(a: Tensor, b: Tensor, factors: Iterable[Tensor], out: Tensor, fast: bool) -> None:
    """Write a @ b^T, scaled: a [M, K], b [N, K] FP8 with K a multiple of 16."""
    a_factor, b_factor = (factor[:1] for factor in factors)
    if a.is_cuda:
        torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            a, b.t(), scale_a=a_factor, scale_b=b_factor, out_dtype=out.dtype, use_fast_accum=fast, out=out
        )
    else:
        out.copy_(a.float() @ b.float().t() * (a_factor * b_factor))
