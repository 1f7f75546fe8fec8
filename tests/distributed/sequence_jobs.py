"""What the ranks of the sequence, vocabulary and expert-width tests run."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moe_framework.distributed.collectives import gather_sequence, sum_scatter_sequence
from moe_framework.distributed.mesh import build_mesh
from moe_framework.model.sequence import SequenceShard
from moe_framework.model.vocabulary import Embedding, cross_entropy_share, first_vocabulary_row
from moe_framework.moe.dispatch.local import LocalDispatcher
from moe_framework.moe.dispatch.width import WidthDispatcher


def tp_group() -> dist.ProcessGroup:
    return build_mesh("cpu", dp=1, ep=1, tp=dist.get_world_size()).tp_group


def gather_and_scatter(whole: Tensor, cotangents: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gather this rank's part of [B, S, D] and scatter this rank's term of [size, B, S, D]; values and gradients."""
    group = tp_group()
    rank = dist.get_rank()
    part = whole.chunk(group.size(), dim=1)[rank].clone().requires_grad_()
    gathered = gather_sequence(part, group)
    gathered.backward(cotangents[rank])
    term = cotangents[rank].clone().requires_grad_()
    scattered = sum_scatter_sequence(term, group)
    scattered.backward(whole.chunk(group.size(), dim=1)[rank])
    assert part.grad is not None
    assert term.grad is not None
    return gathered.detach(), part.grad, scattered.detach(), term.grad


def loss_and_gradient(logits: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This rank's share of the loss of [B, S, V] logits, and the gradient of its part of them, times 3."""
    group = tp_group()
    first = first_vocabulary_row(logits.shape[-1], group)
    own = logits.tensor_split([first, first + -(-logits.shape[-1] // group.size())], dim=-1)[1]
    own = own.to(dtype).clone().requires_grad_()
    share = cross_entropy_share(own, targets, first_row=first, ignore_index=-100, group=group)
    (3.0 * share).backward()
    assert own.grad is not None
    assert own.grad.dtype == dtype
    return share.detach(), own.grad


def embedding_and_gradient(table: Tensor, tokens: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's term of the looked-up rows of [V, D], and the gradient of its part of the table."""
    group = tp_group()
    first = first_vocabulary_row(table.shape[0], group)
    own = table[first : first + -(-table.shape[0] // group.size())].clone().requires_grad_()
    embedding = Embedding(own.shape[0], own.shape[1], _weight=own)
    embedding.first_row = first
    rows = embedding(tokens)
    rows.backward(cotangent)
    assert embedding.weight.grad is not None
    return rows.detach(), embedding.weight.grad


def tokens_of_rank(shape: tuple[int, int], valid: Tensor | None) -> tuple[Tensor | None, Tensor, int]:
    """The layout of this rank's positions."""
    return tuple(SequenceShard(tp_group()).layout(torch.Size(shape), valid, torch.device("cpu")))  # pyright: ignore


def through_sliced_experts(
    tokens: list[Tensor], probs: list[Tensor], experts: list[Tensor], weights: Tensor, cotangents: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Send this rank's tokens through experts x → relu(x W_e[:, :F])·W_e[:, F:]ᵀ·p, of which it has a slice of F.

    Args:
        tokens: [T, D] of each rank.
        probs: [T, K] of each rank.
        experts: [T, K] of each rank.
        weights: [E, D, 2, F]; this rank uses F/size.
        cotangents: [T, D] of each rank.

    Returns:
        The result [T, D], and the gradients of this rank's tokens and probs.
    """
    group, rank = tp_group(), dist.get_rank()
    up, down = weights.chunk(group.size(), dim=-1)[rank].unbind(2)
    x, p = tokens[rank].clone().requires_grad_(), probs[rank].clone().requires_grad_()
    dispatcher = WidthDispatcher(LocalDispatcher(num_experts=weights.shape[0]), group=group)
    dispatched = dispatcher.dispatch(x, p, experts[rank])
    parts = dispatched.rows_RD.split(dispatched.tokens_per_expert.tolist())
    rows = torch.cat([F.relu(part @ up[e]) @ down[e].t() for e, part in enumerate(parts)])
    y = dispatcher.combine(rows * dispatched.probs_R[:, None], dispatched.handle)
    y.backward(cotangents[rank])
    assert x.grad is not None
    assert p.grad is not None
    return y.detach(), x.grad, p.grad
