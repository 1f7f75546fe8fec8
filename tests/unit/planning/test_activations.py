"""The formulas of activations against what the real layers compute."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_framework.config.schema import ModelConfig
from moe_framework.data.loader import collate
from moe_framework.parallel.activation_checkpointing import KEPT
from moe_framework.planning.activations import kept_activations, layer_activations, loss_bytes, mask_bytes
from moe_framework.planning.job import Job
from tests.unit.model.builders import plain_decoder, random_row

SIZES = ModelConfig(
    num_layers=2,
    hidden_size=64,
    intermediate_size=48,
    num_heads=8,
    num_kv_heads=2,
    num_experts=8,
    top_k=2,
    vocab_size=13,
)
ROWS, LENGTH = 2, 128


def job(**changes: Any) -> Job:
    sizes: dict[str, Any] = {
        name: getattr(SIZES, name) for name in ("num_layers", "hidden_size", "intermediate_size", "num_heads")
    }
    sizes |= {name: getattr(SIZES, name) for name in ("num_kv_heads", "num_experts", "top_k", "vocab_size")}
    fixed: dict[str, Any] = {"head_dim": 8, "micro_batch_size": ROWS, "seq_length": LENGTH, "compute_bytes": 4}
    return Job(**(sizes | fixed | changes))


class KeptResults(TorchDispatchMode):
    """Adds up the results of the operators that an activation checkpointing mode keeps."""

    def __init__(self, mode: str):
        super().__init__()
        self.mode, self.num_bytes = mode, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in KEPT[self.mode]:
            results = out if isinstance(out, tuple) else (out,)
            self.num_bytes += sum(r.numel() * r.element_size() for r in results if isinstance(r, Tensor))
        return out


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_what_activation_checkpointing_keeps_is_what_its_operators_return(mode):
    rng = np.random.default_rng(0)
    batch = collate([random_row(rng, [LENGTH], LENGTH, SIZES.vocab_size) for _ in range(ROWS)], tuple(range(ROWS)))
    model = plain_decoder(SIZES, backend="grouped_mm")
    with KeptResults(mode) as kept:
        model(batch.tokens, batch.positions, batch.targets)
    found, tokens = job(activation_checkpointing=mode), ROWS * LENGTH
    expected = SIZES.num_layers * (kept_activations(found, quantized=False) - 4 * tokens * SIZES.hidden_size)
    if mode == "selective":
        # The head, which is no block; and the two products that count each row's experts.
        expected += 4 * tokens * SIZES.vocab_size + SIZES.num_layers * 2 * 4 * ROWS * SIZES.num_experts
    assert kept.num_bytes == expected


def test_transformer_engine_keeps_what_it_saves_in_every_mode():
    whole = layer_activations(job(), quantized=False)
    for mode in ("selective", "full"):
        kept = kept_activations(job(activation_checkpointing=mode, experts_are_recomputed=False), quantized=False)
        assert whole.experts < kept < whole.total


def test_tensor_parallelism_shares_out_positions_heads_and_vocabulary():
    one, two = job(), job(tp=2)
    assert layer_activations(two, quantized=False).experts * 2 == layer_activations(one, quantized=False).experts
    # Whole rows are gathered before attention: their norm's output is not shared out.
    gathered = 4 * ROWS * LENGTH * SIZES.hidden_size
    own, whole = (layer_activations(j, quantized=False).attention - gathered for j in (two, one))
    assert own * 2 == whole
    assert loss_bytes(two) == (4 + 12) * ROWS * LENGTH * 7


def test_quantized_experts_keep_rows_and_hidden_values_in_a_byte():
    plain, small = (layer_activations(job(), quantized=quantized) for quantized in (False, True))
    assert (small.rows * 4, small.hidden * 4) == (plain.rows, plain.hidden)
    assert small.gate_up == plain.gate_up
    assert small.outside_experts == plain.outside_experts


def test_a_mask_is_shared_by_all_layers_and_gives_each_head_its_own_keys():
    assert (mask_bytes(job()), mask_bytes(job(masked=True))) == (0, 4 * ROWS * LENGTH * LENGTH)
    more = (
        layer_activations(job(masked=True), quantized=False).attention
        - layer_activations(job(), quantized=False).attention
    )
    assert more == 4 * ROWS * LENGTH * 2 * (8 - 2) * 8


def test_a_compiled_loss_keeps_no_fp32_logits():
    assert loss_bytes(replace(job(), compute_bytes=2, compiled=True)) * 3 == loss_bytes(replace(job(), compute_bytes=2))
    assert torch.float32.itemsize * 3 * ROWS * LENGTH * 13 == loss_bytes(job())
