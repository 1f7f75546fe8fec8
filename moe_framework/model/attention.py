"""Grouped-query causal self-attention through torch's scaled_dot_product_attention."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from moe_framework.model.linear import Linear
from moe_framework.model.rope import apply_rotary, rotary_tables
from moe_framework.model.sequence import WholeSequence

# The fastest first: on Hopper, cuDNN's takes about half the time of torch's own flash kernel.
KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Given a mask, cuDNN's backward has returned NaN on Hopper since torch 2.11 (pytorch#196678). On CUDA the flash kernel
# refuses masks, on a CPU it takes them.
KERNELS_WITH_MASK = KERNELS[1:]


class AttentionContext(NamedTuple):
    """What every attention layer of a micro-batch shares.

    Attributes:
        cos: [B, 1, S, head_dim] float32, from `rotary_tables`.
        sin: The same.
        mask: [B, 1, S, S] in the compute dtype, added to the scores: 0 where a query may see a key, -inf elsewhere;
            None for plain causal attention. Of a bool mask, every layer would make and keep an additive one.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor | None


def document_mask(document_ids_BS: Tensor) -> Tensor:
    """Causal mask within each document of a packed row.

    Args:
        document_ids_BS: [B, S] int64; padding has an id of its own, so that it sees itself and stays finite.

    Returns:
        [B, 1, S, S] bool, True where query and key are of one document and the key is not later.
    """
    same = document_ids_BS[:, None, :, None] == document_ids_BS[:, None, None, :]
    return same.tril()


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores, in their dtype: 0 where the bool mask is True, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Weight the values by a softmax over the scores.

    Args:
        q: [B, H, S, head_dim].
        k: [B, H or a divisor of it, S, head_dim].
        v: The same shape.
        mask: As in `AttentionContext`.

    Returns:
        [B, H, S, head_dim].
    """
    group_size = q.shape[1] // k.shape[1]
    if mask is None:
        with sdpa_kernel(KERNELS, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group_size > 1)
    if group_size > 1:
        # On CUDA, of the kernels left, torch 2.11 would take the one that keeps all scores: the other groups no heads.
        k, v = k.repeat_interleave(group_size, dim=1), v.repeat_interleave(group_size, dim=1)
    with sdpa_kernel(KERNELS_WITH_MASK, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Attention(nn.Module):
    """Multi-head attention with fewer key and value heads than query heads.

    Source: GQA, arXiv:2305.13245.

    Args:
        hidden_size: D.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides num_heads.
        head_dim: Channels of a head.
        qk_norm_eps: Normalise queries and keys per head before the rotation, as Qwen3 does, with this added to the
            mean square; None for no norm.

    Attributes:
        sequence: Gathers the rows that this rank holds a part of. Under tensor parallelism the projections hold this
            rank's heads, and the result is one term of a sum over ranks, which it scatters again.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm_eps: float | None = None,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.sequence = WholeSequence()
        self.q_proj = Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm = None if qk_norm_eps is None else nn.RMSNorm(head_dim, eps=qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else nn.RMSNorm(head_dim, eps=qk_norm_eps)

    def forward(self, x_BSD: Tensor, context: AttentionContext) -> Tensor:
        """Attend.

        Args:
            x_BSD: [B, S, D]; S are this rank's positions.
            context: Rotation tables and mask, of whole rows.

        Returns:
            [B, S, D].

        Collective: the tensor-parallel group, if there is one; every rank must call.
        """
        x_BSD = self.sequence.gather(x_BSD)
        q, k, v = (
            projection(x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = apply_rotary(q, context.cos, context.sin)
        k = apply_rotary(k, context.cos, context.sin)
        out_BHSd = attend(q, k, v, context.mask)
        return self.sequence.sum_scatter(self.o_proj(out_BHSd.transpose(1, 2).flatten(2)))


def attention_context(
    positions_BS: Tensor,
    document_ids_BS: Tensor | None,
    *,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
) -> AttentionContext:
    """Build what the layers share.

    Args:
        positions_BS: [B, S] int64; positions within each document.
        document_ids_BS: [B, S] int64, or None when no row holds more than one document.
        head_dim: Channels of a head.
        theta: Base of the rotary frequencies.
        dtype: Compute dtype, which the mask has too.

    Returns:
        The context.
    """
    with torch.no_grad():
        cos, sin = rotary_tables(positions_BS, head_dim=head_dim, theta=theta)
        if document_ids_BS is None:
            return AttentionContext(cos, sin, None)
        return AttentionContext(cos, sin, additive_mask(document_mask(document_ids_BS), dtype))
