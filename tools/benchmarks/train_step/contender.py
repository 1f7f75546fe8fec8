"""What the measurement needs to know of a contender, and the tokens that all of them train on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_framework.config.schema import Config, ModelConfig

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Facts:
    """In what a contender's step differs from another's.

    Attributes:
        precision: Of its matrix products.
        master_weights: `fp32` or `none`.
        clipping: Whether gradients are clipped by their global norm.
        optimizer_states: Format of AdamW's moments.
        favours: Whom the differences favour, and why; empty for ours.
        notes: How it is laid out and computed.
    """

    precision: str
    master_weights: str
    clipping: bool
    optimizer_states: str
    favours: str
    notes: str


@dataclass(frozen=True)
class Contender:
    """A model and optimizer ready to train.

    Attributes:
        step: One forward, backward and update on the same tokens each time; returns the loss of this rank's tokens
            before the update, nats per target.
        num_parameters: Of the whole model.
        facts: What is particular to it.
        profiled: What a breakdown by part needs; ours only.
    """

    step: Callable[[], Tensor | float]
    num_parameters: int
    facts: Facts
    profiled: Any = field(default=None)


def random_tokens(config: Config, device: torch.device, *, seed: int, data_rank: int) -> tuple[Tensor, Tensor]:
    """Draw one micro-batch, the same for every contender.

    Args:
        config: Gives rows, length and vocabulary.
        device: Where to put them.
        seed: Of the run.
        data_rank: Ranks have different tokens.

    Returns:
        tokens [B, S] int64, and the next token of each position; the last has none (IGNORE_INDEX).
    """
    generator = torch.Generator().manual_seed(seed * 65537 + data_rank)
    shape = (config.train.micro_batch_size, config.data.seq_length)
    tokens = torch.randint(config.model.vocab_size, shape, generator=generator)
    targets = torch.full_like(tokens, IGNORE_INDEX)
    targets[:, :-1] = tokens[:, 1:]
    return tokens.to(device), targets.to(device)


def active_parameters(sizes: ModelConfig) -> int:
    """Parameters that one token is multiplied with: attention, router, its K experts, head."""
    width, head = sizes.hidden_size, sizes.resolved_head_dim
    attention = 2 * width * head * (sizes.num_heads + sizes.num_kv_heads)
    experts = 3 * width * sizes.intermediate_size * sizes.top_k
    per_layer = attention + experts + width * sizes.num_experts
    return sizes.num_layers * per_layer + sizes.vocab_size * width
