"""Permutations between token order and expert order, as pure functions.

`permute` copies each token once for each expert it chose and sorts the copies by expert; `unpermute` is its
transpose: it sums a token's copies. Their gradients are each other, and both only gather (index_select), because
the scatter-adds that autograd would derive are neither deterministic nor fast.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertOrder(NamedTuple):
    """The order of N = T·K token copies, sorted by expert and stable within an expert.

    Attributes:
        order_N: int64; the copy (t·K + k) at each place of the expert order.
        inverse_N: int64; the place of each copy.
        tokens_per_expert_E: int64.
    """

    order_N: Tensor
    inverse_N: Tensor
    tokens_per_expert_E: Tensor


def inverse_permutation(order_N: Tensor) -> Tensor:
    """Invert a permutation.

    Args:
        order_N: [N] int64, a permutation of 0 to N-1.

    Returns:
        [N] int64 with inverse[order[i]] = i.
    """
    places = torch.arange(order_N.numel(), device=order_N.device)
    return torch.empty_like(order_N).scatter_(0, order_N, places)


def expert_order(experts_TK: Tensor, num_experts: int) -> ExpertOrder:
    """Sort token copies by their expert, without a host-device sync.

    Args:
        experts_TK: [T, K] int64; T may be 0.
        num_experts: Experts E.

    Returns:
        The order.
    """
    experts_N = experts_TK.reshape(-1)
    order_N = torch.argsort(experts_N, stable=True)
    # Not bincount: on CUDA it syncs to size its result.
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=experts_N.device)
    counts_E.scatter_add_(0, experts_N, torch.ones_like(experts_N))
    return ExpertOrder(order_N, inverse_permutation(order_N), counts_E)


def regroup_order(counts: Tensor, num_rows: int) -> Tensor:
    """Order that turns rows grouped by (source rank, expert) into rows grouped by (expert, source rank).

    Args:
        counts: [sources, e] int64; rows from each source for each expert.
        num_rows: R, the sum of counts, known on the host so that nothing syncs.

    Returns:
        [R] int64; row i of the new grouping is row order[i] of the old one.
    """
    starts = counts.flatten().cumsum(0).view_as(counts) - counts
    block_sizes = counts.t().flatten()
    block_starts_old = starts.t().flatten()
    block_starts_new = block_sizes.cumsum(0) - block_sizes
    shift = torch.repeat_interleave(block_starts_old - block_starts_new, block_sizes, output_size=num_rows)
    return torch.arange(num_rows, device=counts.device) + shift


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, order_N, inverse_N, top_k):
        ctx.save_for_backward(inverse_N)
        ctx.top_k = top_k
        return x_TD.index_select(0, order_N // top_k)

    @staticmethod
    def backward(ctx, grad_ND):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _sum_copies(grad_ND, ctx.saved_tensors[0], ctx.top_k), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_ND, order_N, inverse_N, top_k):
        ctx.save_for_backward(order_N)
        ctx.top_k = top_k
        return _sum_copies(rows_ND, inverse_N, top_k)

    @staticmethod
    def backward(ctx, grad_TD):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_TD.index_select(0, ctx.saved_tensors[0] // ctx.top_k), None, None, None


class _ReorderRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_N, order_N, inverse_N):
        ctx.save_for_backward(inverse_N)
        return x_N.index_select(0, order_N)

    @staticmethod
    def backward(ctx, grad_N):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_N.index_select(0, ctx.saved_tensors[0]), None, None


def _sum_copies(rows_ND: Tensor, inverse_N: Tensor, top_k: int) -> Tensor:
    return rows_ND.index_select(0, inverse_N).unflatten(0, (-1, top_k)).sum(1)


def permute(x_TD: Tensor, order: ExpertOrder, top_k: int) -> Tensor:
    """Copy tokens into expert order.

    Args:
        x_TD: [T, D].
        order: From `expert_order`.
        top_k: Copies per token K.

    Returns:
        [N, D], the rows of expert 0 first.
    """
    return _Permute.apply(x_TD, order.order_N, order.inverse_N, top_k)  # pyright: ignore[reportReturnType]


def unpermute(rows_ND: Tensor, order: ExpertOrder, top_k: int) -> Tensor:
    """Sum the copies of each token, back in token order.

    Args:
        rows_ND: [N, D] in expert order.
        order: From `expert_order`.
        top_k: Copies per token K.

    Returns:
        [T, D].
    """
    return _Unpermute.apply(rows_ND, order.order_N, order.inverse_N, top_k)  # pyright: ignore[reportReturnType]


def reorder_rows(x_N: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Reorder rows by a permutation.

    Args:
        x_N: [N, ...].
        order_N: [N] int64; row i of the result is row order[i] of x.
        inverse_N: Its inverse.

    Returns:
        [N, ...].
    """
    return _ReorderRows.apply(x_N, order_N, inverse_N)  # pyright: ignore[reportReturnType]
