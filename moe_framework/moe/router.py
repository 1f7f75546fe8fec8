"""The router: which experts a token goes to, and with which weight."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routing(NamedTuple):
    """What the router decided for T tokens.

    Attributes:
        probs_TK: float32; the weights of the chosen experts, summing to 1 per token.
        experts_TK: int64; the chosen experts, the most probable first.
        logits_TE: float32; the scores of all experts, for the losses and the statistics.
    """

    probs_TK: Tensor
    experts_TK: Tensor
    logits_TE: Tensor


class TopKRouter(nn.Module):
    """Linear scores, the top-k of them, and a softmax over those.

    The softmax over the chosen k equals a softmax over all experts, renormalised over the chosen.

    Source: Mixtral of Experts, arXiv:2401.04088, section 2.1.

    Args:
        hidden_size: Model width D.
        num_experts: Experts E.
        top_k: Experts per token K.
    """

    def __init__(self, *, hidden_size: int, num_experts: int, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))

    def forward(self, x_TD: Tensor) -> Routing:
        """Route T tokens.

        Args:
            x_TD: [T, D], any float dtype; T may be 0.

        Returns:
            The routing, in float32.
        """
        # fp32: a bf16 product changes the choice of some percent of the tokens where scores nearly tie.
        logits_TE = F.linear(x_TD.float(), self.weight.float())
        # Activation checkpointing keeps topk's result, so that a recomputation cannot route a token elsewhere.
        top_logits_TK, experts_TK = torch.topk(logits_TE, self.top_k, dim=-1)
        return Routing(torch.softmax(top_logits_TK, dim=-1), experts_TK, logits_TE)
