"""Embedding and loss over a vocabulary that the ranks of a group share out.

Rank r has the rows from r·ceil(V/size) on; the last may have fewer. Nothing is padded, so that a
vocabulary of any size has the same softmax and the same checkpoint at every layout.

Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_framework.distributed.collectives import all_reduce
from moe_framework.distributed.shards import local_part


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
            return _lookup(self.weight, input)
        weight = local_part(self.weight)
        # A row of zeros that gets no gradient stands for all rows of other ranks.
        absent = weight.shape[0]
        index = input - self.first_row
        index = torch.where((index >= 0) & (index < absent), index, absent)
        return _lookup(F.pad(weight, (0, 0, 0, 1)), index, ignored_row=absent)


class _Lookup(torch.autograd.Function):
    """Rows of a table, whose gradient adds up its tokens in float32 and is rounded to the table's dtype once.

    torch's own adds every token into a row of the table's dtype. In bf16 a row that has 256 times a token's gradient
    no longer changes, and the tokens of a small vocabulary are thousands.
    """

    @staticmethod
    def forward(ctx, weight, index, ignored_row):
        ctx.save_for_backward(index)
        ctx.num_rows, ctx.dtype, ctx.ignored_row = weight.shape[0], weight.dtype, ignored_row
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (index,) = ctx.saved_tensors
        sums = torch.ops.aten.embedding_dense_backward(grad.float(), index, ctx.num_rows, ctx.ignored_row, False)
        return sums.to(ctx.dtype), None, None


def _lookup(weight: Tensor, index: Tensor, *, ignored_row: int = -1) -> Tensor:
    """Take rows; the ignored one gets no gradient."""
    return _Lookup.apply(weight, index, ignored_row)  # pyright: ignore[reportReturnType]


def first_vocabulary_row(vocab_size: int, group: dist.ProcessGroup) -> int:
    """Return the number of the first row of this rank's part, the same split as DTensor's `Shard(0)`."""
    return math.ceil(vocab_size / group.size()) * dist.get_rank(group)


class _CrossEntropyShare(torch.autograd.Function):
    """Keeps the logits in their own dtype and two float32 numbers a token, and recomputes the softmax in backward."""

    @staticmethod
    def forward(ctx, logits_Nv, targets_N, first_row, ignore_index, group):
        logits = logits_Nv.float()
        own, index = _own_targets(targets_N, first_row, logits.shape[1])
        limit_N = all_reduce(logits.amax(-1), "max", group)
        # Everything relative to the largest logit: it may be far from zero, where float32 is coarse.
        sums_N = (logits - limit_N[:, None]).exp().sum(-1)
        chosen_N = torch.where(own, logits.gather(1, index[:, None])[:, 0] - limit_N, 0.0)
        sums_N, chosen_N = all_reduce(torch.stack((sums_N, chosen_N)), "sum", group)
        log_sums_N = sums_N.log()
        counted = targets_N != ignore_index
        ctx.save_for_backward(logits_Nv, limit_N, log_sums_N, targets_N)
        ctx.first_row, ctx.ignore_index = first_row, ignore_index
        return torch.where(counted, log_sums_N - chosen_N, 0.0).sum() / group.size()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_Nv, limit_N, log_sums_N, targets_N = ctx.saved_tensors
        own, index = _own_targets(targets_N, ctx.first_row, logits_Nv.shape[1])
        grads_Nv = (logits_Nv.float() - limit_N[:, None] - log_sums_N[:, None]).exp()
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
