import pytest
import torch

from moe_framework.config.schema import PrecisionConfig
from moe_framework.errors import ConfigError
from moe_framework.precision.modes import AUTO8, MODES, TARGETS, available_modes, resolve_mode
from moe_framework.precision.policy import precision_policy
from moe_framework.precision.recipes import RECIPES


def test_the_schema_offers_exactly_the_modes():
    choices = PrecisionConfig.__annotations__["mode"].__args__
    assert set(choices) == {*MODES, AUTO8}


@pytest.mark.parametrize(("target", "mode"), [("h100", "fp8_current"), ("h200", "fp8_current"), ("b200", "mxfp8")])
def test_auto8_takes_what_the_gpu_has(target: str, mode: str):
    assert resolve_mode(AUTO8, TARGETS[target], target) == mode


@pytest.mark.parametrize("target", ["cpu", "a100"])
def test_auto8_is_refused_where_there_are_no_8_bit_products(target: str):
    with pytest.raises(ConfigError, match=rf"precision\.mode=auto8 needs compute capability 9\.0.*{target}"):
        resolve_mode(AUTO8, TARGETS[target], target)


@pytest.mark.parametrize(
    ("mode", "target", "text"),
    [
        ("fp8_current", "a100", r"needs compute capability 8\.9 or newer; a100 has 8\.0"),
        ("fp8_block", "b200", r"needs compute capability 9\.0 or newer and below 10\.0; b200 has 10\.0"),
        ("mxfp8", "h200", r"needs compute capability 10\.0 or newer; h200 has 9\.0"),
        ("nvfp4", "cpu", r"needs compute capability 10\.0 or newer; cpu has none"),
    ],
)
def test_an_unavailable_mode_names_what_it_needs_and_what_there_is(mode: str, target: str, text: str):
    with pytest.raises(ConfigError, match=text) as caught:
        resolve_mode(mode, TARGETS[target], target)
    for available in available_modes(TARGETS[target]):
        assert available in str(caught.value)


def test_every_mode_that_needs_a_gpu_has_a_recipe():
    assert RECIPES.keys() == {name for name, mode in MODES.items() if mode.least is not None}


def test_policy_of_a_cpu():
    assert precision_policy("fp32", torch.device("cpu")).compute_dtype == torch.float32
    emulated = precision_policy("mxfp8_emulated", torch.device("cpu"))
    assert (emulated.compute_dtype, emulated.te_recipe) == (torch.bfloat16, None)
