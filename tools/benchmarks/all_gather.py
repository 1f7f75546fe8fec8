"""The plain way to dispatch, as a baseline: every rank gathers all tokens and keeps copies for its own experts."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_framework.moe.dispatch.base import Dispatched


class AllGatherHandle(NamedTuple):
    """What `combine` needs: the token, among all ranks' tokens, of each row, and their number."""

    token_R: Tensor
    num_all_tokens: int


class AllGatherDispatcher:
    """Dispatch by an all-gather of all tokens, combine by a reduce-scatter of all results.

    It fulfils `TokenDispatcher` where every rank of the group has the same number of tokens.

    Args:
        num_experts: Experts E of the layer, laid out as in `AllToAllDispatcher`.
        group: The expert-parallel group.
    """

    def __init__(self, *, num_experts: int, group: dist.ProcessGroup):
        self.num_local_experts = num_experts // group.size()
        self.group = group

    def dispatch(self, x_TD: Tensor, probs_TK: Tensor, experts_TK: Tensor) -> Dispatched:
        """Gather all tokens and sort the copies for this rank's experts; see `TokenDispatcher.dispatch`.

        Collective: the expert-parallel group; every rank must call.
        """
        all_x = gather(x_TD, self.group)
        all_probs = gather(probs_TK, self.group).flatten()
        local_expert = _gather(experts_TK, self.group).flatten() - self.group.rank() * self.num_local_experts
        is_here = (local_expert >= 0) & (local_expert < self.num_local_experts)
        key = torch.where(is_here, local_expert, self.num_local_experts)
        counts = torch.zeros(self.num_local_experts + 1, dtype=torch.int64, device=key.device)
        counts.scatter_add_(0, key, torch.ones_like(key))
        # One host-device sync, as the all-to-all has.
        num_rows = key.numel() - int(counts[-1])
        copy_R = torch.argsort(key, stable=True)[:num_rows]
        token_R = copy_R // experts_TK.shape[1]
        return Dispatched(
            all_x.index_select(0, token_R),
            all_probs.index_select(0, copy_R),
            counts[:-1],
            AllGatherHandle(token_R, all_x.shape[0]),
        )

    def combine(self, rows_RD: Tensor, handle: AllGatherHandle) -> Tensor:
        """Add results to their tokens, and sum over the ranks; see `TokenDispatcher.combine`.

        Collective: the expert-parallel group; every rank must call.
        """
        partial = rows_RD.new_zeros(handle.num_all_tokens, rows_RD.shape[1])
        return reduce_scatter(partial.index_add(0, handle.token_R, rows_RD), self.group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_T, group):
        ctx.group = group
        return _gather(x_T, group)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad_T):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gather(grad_T, ctx.group), None


def gather(x_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' tensors; differentiable.

    Args:
        x_T: [T, ...], the same shape on every rank.
        group: The group.

    Returns:
        [ep·T, ...].

    Collective: `group`; every rank must call, in forward and in backward.
    """
    return _Gather.apply(x_T, group)  # pyright: ignore[reportReturnType]


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks and keep this rank's block; differentiable.

    Args:
        x: [ep·T, ...], the same shape on every rank.
        group: The group.

    Returns:
        [T, ...].

    Collective: `group`; every rank must call, in forward and in backward.
    """
    return _ReduceScatter.apply(x, group)  # pyright: ignore[reportReturnType]


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)
    return torch.ops._c10d_functional.wait_tensor(out)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    if x.is_cuda:
        out = torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group.group_name)
        return torch.ops._c10d_functional.wait_tensor(out)
    # gloo's own reduce-scatter is an all-reduce, which sends twice the bytes (torch 2.11): as a baseline it would
    # flatter what is compared with it.
    splits = [x.shape[0] // size] * size
    out = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), splits, splits, group.group_name)
    return torch.ops._c10d_functional.wait_tensor(out).unflatten(0, (size, -1)).sum(0)
