"""The numbers of a training run that decide how much memory a rank needs."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Job:
    """Sizes of model, layout and micro-batch, and the formats.

    Attributes:
        num_layers: Blocks L.
        hidden_size: D.
        intermediate_size: F of one expert.
        num_heads: Query heads H.
        num_kv_heads: Key and value heads.
        head_dim: Channels of a head.
        num_experts: E.
        top_k: K.
        vocab_size: V.
        tie_embeddings: Whether the embedding is the head.
        qk_norm: Whether queries and keys are normalised.
        dp_shard: Data-parallel ranks of one replica.
        dp_replicate: Replicas.
        ep: Expert-parallel ranks.
        tp: Tensor-parallel ranks.
        expert_tp: Ranks that share one expert's width.
        micro_batch_size: Rows B of a micro-batch.
        seq_length: Positions S of a row.
        micro_steps: Micro-batches of an optimizer step.
        compute_bytes: Bytes of a number in the compute format: c, 2 or 4.
        experts_kernel: How the experts are computed: `sequential` (also `loop`, and Transformer Engine in bf16) or
            `grouped`, in the layers that are not quantized.
        quantized_layers: Layers whose experts are quantized; the others are computed in the compute format.
        copy_bytes: Bytes a parameter of the quantized copy that the experts' backward reads.
        experts_are_recomputed: Whether activation checkpointing frees what the experts save: not Transformer Engine's.
        activation_checkpointing: `none`, `selective` or `full`.
        compiled: Whether attention and loss are compiled.
        masked: Whether a row may hold several documents that do not see each other.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    vocab_size: int
    tie_embeddings: bool = False
    qk_norm: bool = False
    dp_shard: int = 1
    dp_replicate: int = 1
    ep: int = 1
    tp: int = 1
    expert_tp: int = 1
    micro_batch_size: int = 1
    seq_length: int = 1
    micro_steps: int = 1
    compute_bytes: int = 2
    experts_kernel: Literal["sequential", "grouped"] = "sequential"
    quantized_layers: range = range(0)
    copy_bytes: float = 0.0
    experts_are_recomputed: bool = True
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    compiled: bool = False
    masked: bool = False

    @property
    def row_tokens(self) -> int:
        """Tokens of a data rank's micro-batch, which the tp ranks share: B·S."""
        return self.micro_batch_size * self.seq_length

    @property
    def tokens(self) -> int:
        """Tokens T of the rank's own positions between attention layers: B·S/tp."""
        return self.row_tokens // self.tp

    @property
    def expert_rows(self) -> int:
        """Token copies R at the rank's experts when load is even: T·K·expert_tp."""
        return self.tokens * self.top_k * self.expert_tp

    @property
    def expert_width(self) -> int:
        """F of the rank's slice of an expert."""
        return self.intermediate_size // self.expert_tp

    @property
    def vocabulary_part(self) -> int:
        """Rows of the embedding that a tp rank has: ceil(V/tp)."""
        return -(-self.vocab_size // self.tp)

    @property
    def expert_shards(self) -> int:
        """Ranks that share one expert's parameters, or one slice of its width."""
        return self.dp_shard * (self.tp if self.expert_tp == 1 else 1)

    @property
    def experts_are_alone(self) -> bool:
        """Whether one rank holds its experts alone, so that FSDP neither gathers nor sums them."""
        return self.expert_shards == self.dp_replicate == 1
