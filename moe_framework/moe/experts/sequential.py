"""The experts one after another, each product at the rate of a dense one: best for a few large experts.

At Mixtral's widths on an H200 this was faster than a grouped kernel and than Transformer Engine's streams; with many
small experts it is far slower (docs/benchmarks.md). The elementwise parts run over all experts' rows at once, and a
weight's gradient is written in the weight's own format, so that a float32 parameter needs no copy of a bf16 gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_framework.moe.experts.base import swiglu


def sequential_experts(
    gate_up: Tensor, down: Tensor, rows_RD: Tensor, probs_R: Tensor, tokens_per_expert: Tensor
) -> Tensor:
    """Apply the experts; see `ExpertBackend`. Syncs with the host for the counts."""
    counts = tokens_per_expert.tolist()
    hidden_RF = swiglu(_ExpertLinear.apply(rows_RD, gate_up, counts), probs_R)  # pyright: ignore[reportArgumentType]
    return _ExpertLinear.apply(hidden_RF, down, counts)  # pyright: ignore[reportReturnType]


class _ExpertLinear(torch.autograd.Function):
    """x_e @ weight_e^T for each expert e; x is [R, K], weight [e, N, K] in x's dtype or float32."""

    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.counts, ctx.weight_dtype = counts, weight.dtype
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return expert_products(x, weight.transpose(-2, -1), counts)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = expert_products(grad, weight, ctx.counts)
        return grad_x, weight_gradients(grad, x, ctx.counts, ctx.weight_dtype), None


# Operators of their own, so that activation checkpointing can keep their results.
@torch.library.custom_op("moe_framework::expert_products", mutates_args=())
def expert_products(x: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply each expert's rows by its matrix.

    Args:
        x: [R, K]; the rows of expert 0 first.
        weights: [e, K, N] of any strides; same dtype.
        counts: Rows of each expert.

    Returns:
        [R, N].
    """
    out = x.new_empty(x.shape[0], weights.shape[2])
    for rows, weight, result in zip(x.split(list(counts)), weights, out.split(list(counts)), strict=True):
        torch.mm(rows, weight, out=result)
    return out


@torch.library.custom_op("moe_framework::expert_weight_gradients", mutates_args=())
def weight_gradients(grad: Tensor, x: Tensor, counts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Multiply each expert's gradients and rows: grad_e^T @ x_e; zeros where it has none.

    Args:
        grad: [R, N].
        x: [R, K]; same dtype.
        counts: Rows of each expert.
        dtype: Of the result; on CUDA the products' float32 sums are then rounded once.

    Returns:
        [e, N, K].
    """
    out = torch.empty(len(counts), grad.shape[1], x.shape[1], dtype=dtype, device=x.device)
    for grad_rows, rows, result in zip(grad.split(list(counts)), x.split(list(counts)), out, strict=True):
        if dtype == x.dtype:
            torch.mm(grad_rows.t(), rows, out=result)
        elif x.is_cuda:
            torch.mm(grad_rows.t(), rows, out_dtype=dtype, out=result)
        else:
            result.copy_(grad_rows.t() @ rows)
    return out


@expert_products.register_fake
def _(x, weights, counts):
    return x.new_empty(x.shape[0], weights.shape[2])


@weight_gradients.register_fake
def _(grad, x, counts, dtype):
    return torch.empty(len(counts), grad.shape[1], x.shape[1], dtype=dtype, device=x.device)
