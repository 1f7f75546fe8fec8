"""Embedding and loss over a vocabulary that the ranks of a group share out.

Rank r has the rows from r·ceil(V/size) on; the last ranks may have fewer, or none. Nothing is padded, so that a
vocabulary of any size has the same softmax and the same checkpoint at every layout.

Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_framework.distributed.collectives import all_reduce
from moe_framework.model.linear import local_weight


class Embedding(nn.Embedding):
    """A table of which this rank may hold some rows.

    Attributes:
        first_row: Number of the first row of this rank's part; None for a table that is here whole.
    """

    first_row: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Look up [B, S] int64 tokens.

        Returns:
            [B, S, D]; zeros where another rank has the row.
        """
        if self.first_row is None:
            return super().forward(input)
        weight = local_weight(self.weight)
        # A row of zeros that gets no gradient stands for all rows of other ranks.
        absent = weight.shape[0]
        index = input - self.first_row
        index = torch.where((index >= 0) & (index < absent), index, absent)
        return F.embedding(index, F.pad(weight, (0, 0, 0, 1)), padding_idx=absent)


def first_vocabulary_row(vocab_size: int, group: dist.ProcessGroup) -> int:
    """Return the number of the first row of this rank's part, the same split as DTensor's `Shard(0)`."""
    return min(math.ceil(vocab_size / group.size()) * dist.get_rank(group), vocab_size)


class _CrossEntropyShare(torch.autograd.Function):
    """Keeps the logits in their own dtype and one float32 number a token, and recomputes the softmax in backward."""

    @staticmethod
    def forward(ctx, logits_Nv, targets_N, first_row, ignore_index, group):
        logits = logits_Nv.float()
        own, index = _own_targets(targets_N, first_row, logits.shape[1])
        if logits.shape[1] == 0:
            logits = F.pad(logits, (0, 1), value=-math.inf)
        limit_N = all_reduce(logits.amax(-1), "max", group)
        sums_N = (logits - limit_N[:, None]).exp().sum(-1)
        chosen_N = torch.where(own, logits.gather(1, index[:, None])[:, 0], 0.0)
        sums_N, chosen_N = all_reduce(torch.stack((sums_N, chosen_N)), "sum", group)
        log_z_N = sums_N.log() + limit_N
        counted = targets_N != ignore_index
        ctx.save_for_backward(logits_Nv, log_z_N, targets_N)
        ctx.first_row, ctx.ignore_index = first_row, ignore_index
        return torch.where(counted, log_z_N - chosen_N, 0.0).sum() / group.size()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_Nv, log_z_N, targets_N = ctx.saved_tensors
        own, index = _own_targets(targets_N, ctx.first_row, logits_Nv.shape[1])
        grads_Nv = (logits_Nv.float() - log_z_N[:, None]).exp()
        columns = torch.arange(logits_Nv.shape[1], device=logits_Nv.device)
        grads_Nv = grads_Nv - (own[:, None] & (columns == index[:, None])).to(grads_Nv.dtype)
        # The objective is the sum of all ranks' equal shares, so its gradient is the whole sum's, not the share's.
        weight_N = (targets_N != ctx.ignore_index).to(grads_Nv.dtype) * grad
        return (grads_Nv * weight_N[:, None]).to(logits_Nv.dtype), None, None, None, None


def _own_targets(targets_N: Tensor, first_row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Whether this rank has each target's logit, and in which column; 0 where it has not."""
    index = targets_N - first_row
    own = (index >= 0) & (index < num_rows)
    return own, torch.where(own, index, 0)


def cross_entropy_share(
    logits_BSv: Tensor, targets_BS: Tensor, *, first_row: int, ignore_index: int, group: dist.ProcessGroup
) -> Tensor:
    """Compute this rank's equal share of the cross entropy, summed over the targets, without gathering the logits.

    Args:
        logits_BSv: [B, S, v] in the compute dtype; of this rank's part of the vocabulary.
        targets_BS: [B, S] int64; the same on every rank.
        first_row: Number of the first token of this rank's part.
        ignore_index: Target of the positions that do not count.
        group: The ranks that share the vocabulary.

    Returns:
        float32 scalar, nats: the sum divided by the group's size. Its gradient is that of the sum over the ranks.

    Collective: `group`; every rank must call.
    """
    logits_Nv, targets_N = logits_BSv.flatten(0, 1), targets_BS.flatten()
    return _CrossEntropyShare.apply(logits_Nv, targets_N, first_row, ignore_index, group)  # pyright: ignore[reportReturnType]


def gather_logits(logits_BSv: Tensor, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
    """Put the ranks' logits together, outside autograd.

    Args:
        logits_BSv: [B, S, v]; of this rank's part of the vocabulary.
        vocab_size: V.
        group: The ranks that share the vocabulary.

    Returns:
        [B, S, V].

    Collective: `group`; every rank must call.
    """
    width = math.ceil(vocab_size / group.size())
    padded = F.pad(logits_BSv.detach(), (0, width - logits_BSv.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts, dim=-1)[..., :vocab_size]
