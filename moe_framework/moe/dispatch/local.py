"""Dispatch without communication: every expert is on this rank (ep = 1). Never syncs with the host."""

from torch import Tensor

from moe_framework.moe.dispatch.base import Dispatched
from moe_framework.moe.permute import ExpertOrder, expert_order, permute, reorder_rows, unpermute


class LocalDispatcher:
    """Sorts tokens by expert, and back.

    Args:
        num_experts: Experts E, all on this rank.
    """

    def __init__(self, *, num_experts: int):
        self.num_experts = num_experts

    def dispatch(self, x_TD: Tensor, probs_TK: Tensor, experts_TK: Tensor) -> Dispatched:
        """Sort token copies by expert; see `TokenDispatcher.dispatch`."""
        top_k = experts_TK.shape[1]
        order = expert_order(experts_TK, self.num_experts)
        rows_ND = permute(x_TD, order, top_k)
        probs_N = reorder_rows(probs_TK.reshape(-1), order.order_N, order.inverse_N)
        return Dispatched(rows_ND, probs_N, order.tokens_per_expert_E, (order, top_k))

    def combine(self, rows_RD: Tensor, handle: tuple[ExpertOrder, int]) -> Tensor:
        """Sum each token's copies; see `TokenDispatcher.combine`."""
        return unpermute(rows_RD, *handle)
