"""Load-balancing losses and the statistics behind router health.

Every loss is returned as a sum over tokens, not as a mean: the training step divides by the global number of
routed tokens, so that no loss depends on how rows are spread over ranks or micro-batches.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_framework.distributed.collectives import all_reduce_sum
from moe_framework.moe.router import Routing


class RouterStats(NamedTuple):
    """What one layer's routing adds to the objective and to the logs.

    Attributes:
        aux_loss: float32 scalar; load-balancing loss times its tokens, differentiable.
        z_loss: float32 scalar; squared logsumexp of the logits, summed over tokens, differentiable.
        tokens_per_expert_E: [E] int64; token copies that chose each expert, on this rank.
        entropy: float32 scalar; entropy of the routing distribution over all experts, in nats, summed over tokens.
    """

    aux_loss: Tensor
    z_loss: Tensor
    tokens_per_expert_E: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class Balancing:
    """How load is balanced.

    Attributes:
        aux_loss: `sequence`, `global_batch` or `none`.
        batch_group: All ranks with tokens, over which `global_batch` sums its counts; None for one rank.
        row_group: The ranks that share each row's tokens, over which `sequence` sums its counts; None for one rank.
    """

    aux_loss: str = "sequence"
    batch_group: dist.ProcessGroup | None = None
    row_group: dist.ProcessGroup | None = None

    def __call__(self, routing: Routing, row_of_token_T: Tensor, num_rows: int) -> RouterStats:
        """Compute the losses and statistics of one layer.

        Args:
            routing: The layer's routing of T tokens.
            row_of_token_T: [T] int64; the row of the micro-batch that each token is in.
            num_rows: Rows B of the micro-batch.

        Returns:
            The statistics.

        Collective: `batch_group` when `aux_loss` is `global_batch`, `row_group` when it is `sequence`; every rank
            must call.
        """
        probs_TE = torch.softmax(routing.logits_TE, dim=-1)
        chosen_TE = torch.zeros_like(probs_TE).scatter_(1, routing.experts_TK, 1.0)
        log_z_T = torch.logsumexp(routing.logits_TE, dim=-1)
        if self.aux_loss == "sequence":
            aux_loss = sequence_aux_loss(probs_TE, chosen_TE, row_of_token_T, num_rows, self.row_group)
        elif self.aux_loss == "global_batch":
            aux_loss = global_batch_aux_loss(probs_TE, chosen_TE, self.batch_group)
        else:
            aux_loss = probs_TE.new_zeros(())
        with torch.no_grad():
            entropy = -torch.special.xlogy(probs_TE, probs_TE).sum()
            tokens_per_expert_E = chosen_TE.sum(0, dtype=torch.float64).to(torch.int64)
        return RouterStats(aux_loss, log_z_T.square().sum(), tokens_per_expert_E, entropy)


def sequence_aux_loss(
    probs_TE: Tensor,
    chosen_TE: Tensor,
    row_of_token_T: Tensor,
    num_rows: int,
    row_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Balance within each row: Σ_s n_s · E · Σ_e f_se · P_se.

    n_s is the row's number of tokens, f_se its share of slots that chose expert e (no gradient), P_se its mean
    probability of e. A perfectly balanced row adds n_s, so the loss per token is then 1. Where ranks share a row, f
    is counted over all of them; the loss is linear in P, so each adds its own tokens' part.

    Source: DeepSeek-V3, arXiv:2412.19437, equations 17 to 20, with the softmax of Switch Transformers,
    arXiv:2101.03961, equations 4 to 6.

    Args:
        probs_TE: [T, E] float32; softmax over all experts.
        chosen_TE: [T, E] float32; 1 where a token chose an expert.
        row_of_token_T: [T] int64; the row of each token.
        num_rows: Rows in the micro-batch; some may have no token.
        row_group: The ranks that share the rows' tokens; None for one rank.

    Returns:
        float32 scalar, summed over this rank's tokens.

    Collective: `row_group`; every rank must call.
    """
    num_experts = probs_TE.shape[1]
    # A product with the 0/1 membership matrix sums rows in a fixed order; scatter-adds on CUDA do not.
    rows = torch.arange(num_rows, device=probs_TE.device)
    member_BT = (rows[:, None] == row_of_token_T[None, :]).to(probs_TE.dtype)
    counts_BE = member_BT @ chosen_TE.detach()
    if row_group is not None:
        # A copy: selective checkpointing keeps the product itself, and would sum a kept sum again.
        counts_BE = all_reduce_sum(counts_BE.clone(), row_group)
    share_BE = counts_BE / counts_BE.sum(1, keepdim=True).clamp_min(1)
    return num_experts * (share_BE * (member_BT @ probs_TE)).sum()


def global_batch_aux_loss(probs_TE: Tensor, chosen_TE: Tensor, batch_group: dist.ProcessGroup | None) -> Tensor:
    """Balance over the tokens of all ranks of a micro-step: T · E · Σ_e f_e · P_e.

    Source: Demons in the Detail, arXiv:2501.11873, section 3.

    Args:
        probs_TE: [T, E] float32; softmax over all experts.
        chosen_TE: [T, E] float32; 1 where a token chose an expert.
        batch_group: All ranks with tokens; None for one rank.

    Returns:
        float32 scalar, summed over this rank's tokens.

    Collective: `batch_group`; every rank must call.
    """
    counts_E = chosen_TE.detach().sum(0)
    if batch_group is not None:
        counts_E = all_reduce_sum(counts_E, batch_group)
    share_E = counts_E / counts_E.sum().clamp_min(1)
    return probs_TE.shape[1] * (share_E * probs_TE.sum(0)).sum()
