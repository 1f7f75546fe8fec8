from pathlib import Path

import pytest
import torch

from moe_framework.config.load import load_config
from moe_framework.config.schema import Config
from moe_framework.moe.experts.choose import BACKENDS, PLAIN_INSTEAD, Choice, make_backend
from moe_framework.precision.policy import PrecisionPolicy
from moe_framework.precision.recipes import RECIPES
from moe_framework.train.model import _layer_format, expert_shape

CONFIGS = Path(__file__).parents[3] / "configs"


def compose(*overrides: str) -> Config:
    return load_config("L0_sanity", overrides, CONFIGS)


@pytest.mark.parametrize(
    ("backend", "mode", "plain"),
    [("scaled_mm", "fp8_current", "sequential"), ("mxfp8_emulated",) * 2 + ("grouped_mm",)],
)
def test_layers_that_stay_in_bf16_get_a_backend_that_does_not_quantize(backend: str, mode: str, plain: str):
    config = compose(f"precision.mode={mode}", "precision.bf16_first_layers=1", "precision.bf16_last_layers=1")
    policy = PrecisionPolicy(mode, torch.bfloat16, te_recipe=RECIPES.get(mode))
    formats = [_layer_format(config, layer, policy, Choice(backend, "")) for layer in range(4)]
    assert [(own.mode, name) for own, name in formats] == [
        ("bf16", plain),
        (mode, backend),
        (mode, backend),
        ("bf16", plain),
    ]
    made = [make_backend(name, expert_shape(config), own) for own, name in formats]
    assert made[0] is made[3] is BACKENDS[PLAIN_INSTEAD[backend]]


@pytest.mark.parametrize(
    ("layout", "alone"),
    [
        ("parallel.dp=1 parallel.ep=2", True),
        ("parallel.dp=1 parallel.ep=1 parallel.tp=2 parallel.expert_tp=2", True),
        ("parallel.dp=1 parallel.ep=1 parallel.tp=2", False),
        ("parallel.dp=2 parallel.ep=2", False),
        ("parallel.dp=2 parallel.dp_replicate=2 parallel.ep=1", False),
    ],
)
def test_a_backend_gets_master_weights_where_no_other_rank_has_the_expert(layout: str, alone: bool):
    assert expert_shape(compose(*layout.split())).float32_weights is alone
