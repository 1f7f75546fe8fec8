"""The Mixtral-type decoder: embedding, blocks, norm, head, and the loss."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_framework.distributed.shards import local_part
from moe_framework.model.attention import Attention, attention_context
from moe_framework.model.block import Block
from moe_framework.model.linear import Linear
from moe_framework.model.sequence import WholeSequence
from moe_framework.model.vocabulary import Embedding
from moe_framework.moe.layer import MoELayer

IGNORE_INDEX = -100


class DecoderOutput(NamedTuple):
    """This rank's part of the sums over a micro-batch; the training step adds the ranks' and divides by global counts.

    Attributes:
        loss: float32 scalar; cross entropy in nats, summed over the targets. The ranks of a tensor-parallel group
            have equal shares of it; of the other sums, each has that over its own tokens.
        aux_loss: float32 scalar; load-balancing loss, summed over tokens and layers.
        z_loss: float32 scalar; router z-loss, summed over tokens and layers.
        tokens_per_expert_LE: [L, E] int64; token copies that chose each expert.
        entropy_L: [L] float32; routing entropy in nats, summed over tokens.
        logits_BSV: [B, S, V] in compute dtype, when no targets were given; otherwise None, to let them be freed. V is
            this rank's part of the vocabulary.
    """

    loss: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    tokens_per_expert_LE: Tensor
    entropy_L: Tensor
    logits_BSV: Tensor | None


class Decoder(nn.Module):
    """A decoder whose feed-forward layers are mixtures of experts.

    Source: Mixtral of Experts, arXiv:2401.04088.

    Args:
        num_layers: Blocks L.
        hidden_size: D.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Channels of a head.
        vocab_size: V.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in RMSNorm.
        tie_embeddings: Use the embedding as the head; there is then no `lm_head` parameter.
        make_moe: Makes the MoE layer of a block, given the block's number.
        qk_norm: Normalise queries and keys per head.

    Attributes:
        sequence: Which positions of a row this rank holds between attention layers.
        cross_entropy_sum: Computes the loss from logits and targets.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
        rope_theta: float,
        norm_eps: float,
        tie_embeddings: bool,
        make_moe: Callable[[int], MoELayer],
        qk_norm: bool = False,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.embed = Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            Block(
                hidden_size=hidden_size,
                norm_eps=norm_eps,
                attention=Attention(
                    hidden_size=hidden_size,
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    qk_norm_eps=norm_eps if qk_norm else None,
                ),
                moe=make_moe(layer),
            )
            for layer in range(num_layers)
        )
        self.norm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.lm_head = None if tie_embeddings else Linear(hidden_size, vocab_size, bias=False)
        self.sequence = WholeSequence()
        self.cross_entropy_sum: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor,
        targets_BS: Tensor | None = None,
        *,
        document_ids_BS: Tensor | None = None,
        valid_index_T: Tensor | None = None,
    ) -> DecoderOutput:
        """Predict each next token.

        Args:
            tokens_BS: [B, S] int64.
            positions_BS: [B, S] int64; positions within each document.
            targets_BS: [B, S] int64; the token to predict at each position, or IGNORE_INDEX (-100).
            document_ids_BS: [B, S] int64; None when no row holds more than one document.
            valid_index_T: [T] int64; flat positions that hold tokens; None when there is no padding.

        Returns:
            Loss sums and routing statistics; logits only without targets.

        Collective: the expert- and tensor-parallel groups, and the sharding groups under FSDP; every rank must call.
        """
        layout = self.sequence.layout(tokens_BS.shape, valid_index_T, tokens_BS.device)
        x_BSD = self.sequence.sum_scatter(self.embed(tokens_BS))
        context = attention_context(
            positions_BS, document_ids_BS, head_dim=self.head_dim, theta=self.rope_theta, dtype=x_BSD.dtype
        )
        stats = []
        for block in self.layers:
            x_BSD, layer_stats = block(x_BSD, context, layout)
            stats.append(layer_stats)
        logits_BSV = self._head(self.sequence.gather(self.norm(x_BSD)))
        no_loss = logits_BSV.new_zeros((), dtype=torch.float32)
        return DecoderOutput(
            loss=no_loss if targets_BS is None else self.cross_entropy_sum(logits_BSV, targets_BS),
            aux_loss=torch.stack([s.aux_loss for s in stats]).sum(),
            z_loss=torch.stack([s.z_loss for s in stats]).sum(),
            tokens_per_expert_LE=torch.stack([s.tokens_per_expert_E for s in stats]),
            entropy_L=torch.stack([s.entropy for s in stats]),
            logits_BSV=logits_BSV if targets_BS is None else None,
        )

    def _head(self, x_BSD: Tensor) -> Tensor:
        return F.linear(x_BSD, local_part(self.embed.weight)) if self.lm_head is None else self.lm_head(x_BSD)


def cross_entropy_sum(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Sum the cross entropy over the targets.

    Args:
        logits_BSV: [B, S, V] in the compute dtype.
        targets_BS: [B, S] int64; IGNORE_INDEX where there is none.

    Returns:
        float32 scalar, nats.
    """
    logits = logits_BSV.flatten(0, 1).float()
    return F.cross_entropy(logits, targets_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
