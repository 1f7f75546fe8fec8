import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_framework.config.schema import ModelConfig
from moe_framework.model.init import initialise
from tests.unit.model.builders import SMALL, plain_decoder

WIDE = ModelConfig(
    num_layers=3,
    hidden_size=128,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    num_experts=4,
    top_k=2,
    vocab_size=256,
)


def parameters(sizes: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in plain_decoder(sizes, seed=seed).named_parameters()}


def test_std_is_as_set_and_smaller_for_projections_into_the_residual_stream():
    for name, value in parameters(WIDE).items():
        if value.ndim == 1:
            assert torch.equal(value, torch.ones_like(value)), name
            continue
        residual = name.endswith(("o_proj.weight", "experts.down"))
        std = 0.02 / math.sqrt(2 * 3) if residual else 0.02
        # Within 5 standard errors: 1/√(2n) for the deviation, 1/√n for the mean.
        assert value.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * value.numel())), name
        assert value.mean().item() == pytest.approx(0.0, abs=5 * std / math.sqrt(value.numel())), name


def test_norms_are_the_only_vectors():
    names = [name for name, value in parameters(SMALL).items() if value.ndim == 1]
    assert names
    assert all(name.endswith("norm.weight") for name in names)


def test_experts_and_layers_and_parameters_differ():
    values = parameters(SMALL)
    for kind in ("gate_up", "down"):
        experts = [e for layer in (0, 1) for e in values[f"layers.{layer}.moe.experts.{kind}"]]
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(experts, 2))
    head, embedding = values["lm_head.weight"], values["embed.weight"]
    assert head.shape == embedding.shape
    assert not torch.equal(head, embedding)
    for name in ("k_proj", "v_proj"):
        first, second = (values[f"layers.{layer}.attention.{name}.weight"] for layer in (0, 1))
        assert not torch.equal(first, second)
    assert not torch.equal(values["layers.0.attention.k_proj.weight"], values["layers.0.attention.v_proj.weight"])


def test_the_same_seed_repeats_and_another_differs():
    first, again, other = parameters(SMALL, 7), parameters(SMALL, 7), parameters(SMALL, 8)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert value.ndim == 1 or not torch.equal(value, other[name]), name


def test_a_parameter_depends_on_its_name_and_not_on_what_was_drawn_before():
    few, many = parameters(SMALL), parameters(replace(SMALL, num_layers=3))
    unscaled = [name for name in few if not name.endswith(("o_proj.weight", "experts.down"))]
    assert len(unscaled) > 10
    for name in unscaled:
        assert torch.equal(few[name], many[name]), name


def test_the_global_random_state_is_neither_used_nor_moved():
    torch.manual_seed(1)
    first = parameters(SMALL)
    torch.manual_seed(2)
    second = parameters(SMALL)
    assert all(torch.equal(first[name], second[name]) for name in first)
    model = plain_decoder(SMALL)  # the constructors draw; initialising does not
    before = torch.get_rng_state()
    initialise(model, seed=0, init_std=0.02, num_layers=2)
    assert torch.equal(torch.get_rng_state(), before)
