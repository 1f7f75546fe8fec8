"""The MoE layer: route, dispatch, compute, combine."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_framework.moe.balancing import Balancing, RouterStats
from moe_framework.moe.dispatch.base import TokenDispatcher
from moe_framework.moe.experts.layer import GroupedExperts
from moe_framework.moe.router import TopKRouter


class TokenLayout(NamedTuple):
    """Which positions of a micro-batch hold tokens; the same for all layers.

    Attributes:
        valid_index_T: [T] int64; flat positions b·S+s of the tokens, or None when there is no padding.
        row_of_token_T: [T] int64; the row b of each token.
        num_rows: Rows B.
    """

    valid_index_T: Tensor | None
    row_of_token_T: Tensor
    num_rows: int

    @classmethod
    def of(cls, shape: torch.Size, valid_index_T: Tensor | None, device: torch.device) -> "TokenLayout":
        """Describe a micro-batch of `shape` [B, S] with the given positions of tokens, all if None."""
        num_rows, length = shape
        index = torch.arange(num_rows * length, device=device) if valid_index_T is None else valid_index_T
        return cls(valid_index_T, index // length, num_rows)


class MoELayer(nn.Module):
    """A dropless Mixture-of-Experts feed-forward layer.

    Args:
        router: Chooses experts.
        dispatcher: Carries tokens to the ranks of their experts and back.
        experts: The parameters and their backend.
        balancing: Losses and statistics.
    """

    def __init__(
        self, *, router: TopKRouter, dispatcher: TokenDispatcher, experts: GroupedExperts, balancing: Balancing
    ):
        super().__init__()
        self.router = router
        self.experts = experts
        self.dispatcher = dispatcher
        self.balancing = balancing

    def forward(self, x_BSD: Tensor, layout: TokenLayout) -> tuple[Tensor, RouterStats]:
        """Apply the layer; padding is neither routed nor counted, and its output is zero.

        Args:
            x_BSD: [B, S, D].
            layout: Where the tokens are.

        Returns:
            [B, S, D], and this rank's losses and statistics.

        Collective: the expert-parallel group; every rank must call, also one with no tokens.
        """
        x_TD = _take_tokens(x_BSD, layout)
        routing = self.router(x_TD)
        dispatched = self.dispatcher.dispatch(x_TD, routing.probs_TK, routing.experts_TK)
        rows_RD = self.experts(dispatched.rows_RD, dispatched.probs_R, dispatched.tokens_per_expert)
        y_TD = self.dispatcher.combine(rows_RD, dispatched.handle)
        stats = self.balancing(routing, layout.row_of_token_T, layout.num_rows)
        return _put_tokens(y_TD, x_BSD, layout), stats


def _take_tokens(x_BSD: Tensor, layout: TokenLayout) -> Tensor:
    x_flat = x_BSD.flatten(0, 1)
    return x_flat if layout.valid_index_T is None else x_flat.index_select(0, layout.valid_index_T)


def _put_tokens(y_TD: Tensor, like_BSD: Tensor, layout: TokenLayout) -> Tensor:
    if layout.valid_index_T is None:
        return y_TD.view_as(like_BSD)
    flat = torch.zeros_like(like_BSD).flatten(0, 1)
    return flat.index_copy(0, layout.valid_index_T, y_TD).view_as(like_BSD)
