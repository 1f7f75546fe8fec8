"""Dispatch by all-to-all over the expert-parallel group: each copy is sent once, to its expert's rank."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_framework.distributed.collectives import all_to_all_rows, exchange_counts
from moe_framework.moe.counts import HostCounts
from moe_framework.moe.dispatch.base import Dispatched
from moe_framework.moe.permute import (
    ExpertOrder,
    expert_order,
    inverse_permutation,
    permute,
    regroup_order,
    reorder_rows,
    unpermute,
)


class AllToAllHandle(NamedTuple):
    """What `combine` needs to undo one dispatch."""

    order: ExpertOrder
    top_k: int
    input_splits: list[int]
    output_splits: list[int]
    regroup_R: Tensor
    regroup_inverse_R: Tensor


class AllToAllDispatcher:
    """Token exchange with exact, uneven splits; ranks and experts with zero tokens are normal.

    Args:
        num_experts: Experts E of the layer; rank r of the group has experts r·E/ep to (r+1)·E/ep - 1.
        group: The expert-parallel group.
    """

    def __init__(self, *, num_experts: int, group: dist.ProcessGroup):
        self.num_experts = num_experts
        self.group = group

    def dispatch(self, x_TD: Tensor, probs_TK: Tensor, experts_TK: Tensor) -> Dispatched:
        """Send each copy to its expert's rank; see `TokenDispatcher.dispatch`.

        Collective: the expert-parallel group; every rank must call, also one with no tokens.
        """
        top_k = experts_TK.shape[1]
        order = expert_order(experts_TK, self.num_experts)
        rows_ND = permute(x_TD, order, top_k)
        probs_N = reorder_rows(probs_TK.reshape(-1), order.order_N, order.inverse_N)

        sent = order.tokens_per_expert_E.view(self.group.size(), -1)
        received = exchange_counts(sent, self.group)
        # The one host-device sync of a layer: all-to-all takes its split sizes from the host.
        ep, per_expert = self.group.size(), received.sum(0)
        on_host = torch.cat([sent.sum(1), received.sum(1), per_expert]).tolist()
        input_splits, output_splits, values = on_host[:ep], on_host[ep : 2 * ep], on_host[2 * ep :]
        rows_RD = all_to_all_rows(rows_ND, output_splits, input_splits, self.group)
        probs_R = all_to_all_rows(probs_N, output_splits, input_splits, self.group)

        regroup_R = regroup_order(received, sum(output_splits))
        regroup_inverse_R = inverse_permutation(regroup_R)
        handle = AllToAllHandle(order, top_k, input_splits, output_splits, regroup_R, regroup_inverse_R)
        return Dispatched(
            reorder_rows(rows_RD, regroup_R, regroup_inverse_R),
            reorder_rows(probs_R, regroup_R, regroup_inverse_R),
            HostCounts.of(per_expert, values),
            handle,
        )

    def combine(self, rows_RD: Tensor, handle: AllToAllHandle) -> Tensor:
        """Send each result back and sum per token; see `TokenDispatcher.combine`.

        Collective: the expert-parallel group; every rank must call.
        """
        rows_RD = reorder_rows(rows_RD, handle.regroup_inverse_R, handle.regroup_R)
        rows_ND = all_to_all_rows(rows_RD, handle.input_splits, handle.output_splits, self.group)
        return unpermute(rows_ND, handle.order, handle.top_k)
