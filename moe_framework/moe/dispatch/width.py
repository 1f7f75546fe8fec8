"""Dispatch to experts whose width the ranks of a group share: each rank applies its slice to the tokens of all.

The ranks first dispatch their own tokens, so that each copy crosses the expert-parallel group once, and then gather
the rows of their group. The experts' results are terms of a sum, which goes back to the row's own rank.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_framework.distributed.collectives import all_to_all_rows, exchange_counts
from moe_framework.moe.counts import HostCounts
from moe_framework.moe.dispatch.base import Dispatched, TokenDispatcher
from moe_framework.moe.permute import inverse_permutation, regroup_order, reorder_rows


class WidthHandle(NamedTuple):
    """What `combine` needs to undo one dispatch."""

    inner: Any
    rows_of_rank: list[int]
    own_rows: list[int]
    regroup_R: Tensor
    regroup_inverse_R: Tensor


class WidthDispatcher:
    """Gathers what another dispatcher received over the ranks that share the experts' width.

    Args:
        inner: Carries the tokens to the ranks of their experts.
        group: The ranks that share each expert's width; they have the same experts.
    """

    def __init__(self, inner: TokenDispatcher, *, group: dist.ProcessGroup):
        self.inner = inner
        self.group = group

    def dispatch(self, x_TD: Tensor, probs_TK: Tensor, experts_TK: Tensor) -> Dispatched:
        """Send each copy to all slices of its expert; see `TokenDispatcher.dispatch`.

        Collective: `group` and the inner dispatcher's; every rank must call.
        """
        own = self.inner.dispatch(x_TD, probs_TK, experts_TK)
        size = self.group.size()
        received = exchange_counts(own.tokens_per_expert.expand(size, -1).contiguous(), self.group)
        per_expert = received.sum(0)
        # A second host-device sync, the last one of the layer: the sizes of the gathered blocks, and the counts.
        on_host: list[int] = torch.cat([received.sum(1), per_expert]).tolist()
        rows_of_rank, values = on_host[:size], on_host[size:]
        own_rows = [own.rows_RD.shape[0]] * size
        # The same rows for every rank: as an exchange whose transpose returns each rank's terms to be added.
        rows_RD = all_to_all_rows(own.rows_RD.repeat(size, 1), rows_of_rank, own_rows, self.group)
        probs_R = all_to_all_rows(own.probs_R.repeat(size), rows_of_rank, own_rows, self.group)

        regroup_R = regroup_order(received, sum(rows_of_rank))
        regroup_inverse_R = inverse_permutation(regroup_R)
        return Dispatched(
            reorder_rows(rows_RD, regroup_R, regroup_inverse_R),
            reorder_rows(probs_R, regroup_R, regroup_inverse_R),
            HostCounts.of(per_expert, values),
            WidthHandle(own.handle, rows_of_rank, own_rows, regroup_R, regroup_inverse_R),
        )

    def combine(self, rows_RD: Tensor, handle: WidthHandle) -> Tensor:
        """Add the slices' results of each row on its own rank, then combine; see `TokenDispatcher.combine`.

        Collective: `group` and the inner dispatcher's; every rank must call.
        """
        rows_RD = reorder_rows(rows_RD, handle.regroup_inverse_R, handle.regroup_R)
        terms = all_to_all_rows(rows_RD, handle.own_rows, handle.rows_of_rank, self.group)
        return self.inner.combine(terms.unflatten(0, (self.group.size(), -1)).sum(0), handle.inner)
