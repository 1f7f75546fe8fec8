"""Small decoders without any parallelism, and random packed batches, for the tests of several folders."""

import numpy as np
import torch

from moe_framework.config.schema import ModelConfig
from moe_framework.data.loader import Batch, collate
from moe_framework.data.rows import Row, empty_row
from moe_framework.data.tokenizer import IGNORE_INDEX
from moe_framework.model.decoder import Decoder
from moe_framework.model.init import initialise
from moe_framework.moe.balancing import Balancing
from moe_framework.moe.dispatch.local import LocalDispatcher
from moe_framework.moe.experts.choose import BACKENDS
from moe_framework.moe.experts.layer import GroupedExperts
from moe_framework.moe.layer import MoELayer
from moe_framework.moe.router import TopKRouter

# Every pair of sizes differs, so that a swapped dim cannot pass; 4 ranks can share all that must be shared.
SMALL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    num_experts=8,
    top_k=2,
    vocab_size=13,
    max_positions=64,
    init_std=0.1,
)


def plain_moe(sizes: ModelConfig, *, backend: str = "loop", aux_loss: str = "sequence") -> MoELayer:
    """Make an MoE layer on one process, uninitialised."""
    return MoELayer(
        router=TopKRouter(hidden_size=sizes.hidden_size, num_experts=sizes.num_experts, top_k=sizes.top_k),
        dispatcher=LocalDispatcher(num_experts=sizes.num_experts),
        experts=GroupedExperts(
            num_experts=sizes.num_experts,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            backend=BACKENDS[backend],
        ),
        balancing=Balancing(aux_loss, None),
    )


def plain_decoder(
    sizes: ModelConfig = SMALL, *, backend: str = "loop", aux_loss: str = "sequence", seed: int = 0
) -> Decoder:
    """Make an initialised decoder on one process, with plain tensors as parameters."""
    model = Decoder(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.resolved_head_dim,
        vocab_size=sizes.vocab_size,
        rope_theta=sizes.rope_theta,
        norm_eps=sizes.norm_eps,
        tie_embeddings=sizes.tie_embeddings,
        qk_norm=sizes.qk_norm,
        make_moe=lambda _layer: plain_moe(sizes, backend=backend, aux_loss=aux_loss),
    )
    initialise(model, seed=seed, init_std=sizes.init_std, num_layers=sizes.num_layers)
    return model


def random_row(rng: np.random.Generator, lengths: list[int], seq_length: int, vocab_size: int) -> Row:
    """Pack documents of the given lengths into one row, padding last; a quarter of the targets is ignored."""
    if not lengths:
        return empty_row(seq_length)
    num_tokens = sum(lengths)
    row = empty_row(seq_length)
    row.tokens[:num_tokens] = rng.integers(1, vocab_size, num_tokens)
    targets = rng.integers(1, vocab_size, num_tokens)
    row.targets[:num_tokens] = np.where(rng.random(num_tokens) < 0.25, IGNORE_INDEX, targets)
    row.positions[:num_tokens] = np.concatenate([np.arange(length) for length in lengths])
    row.document_ids[:num_tokens] = np.repeat(np.arange(len(lengths)), lengths)
    return row._replace(num_tokens=num_tokens)


def random_batch(seed: int, lengths: list[list[int]], *, seq_length: int, vocab_size: int = SMALL.vocab_size) -> Batch:
    """Make a batch with one row per list of document lengths."""
    rng = np.random.default_rng(seed)
    return collate([random_row(rng, row, seq_length, vocab_size) for row in lengths], tuple(range(len(lengths))))


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖a − b‖/‖b‖, and ‖a‖ where b is zero; not finite unless both are."""
    actual, expected = actual.detach().double(), expected.detach().double()
    scale = expected.norm().item()
    return (actual - expected).norm().item() / (scale or 1.0)
