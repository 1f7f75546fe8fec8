"""What Transformer Engine is asked for; tests/gpu has what it computes."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from moe_framework.precision.recipes import RECIPES


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a package of Transformer Engine's name in place, whose recipes are their own arguments."""
    common = ModuleType("transformer_engine.common")
    common.recipe = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        Format=SimpleNamespace(E4M3="E4M3", HYBRID="HYBRID"),
        MXFP8BlockScaling=lambda **options: options,
        DelayedScaling=lambda **options: options,
    )
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.common", common)


@pytest.mark.usefixtures("engine")
def test_mxfp8_is_e4m3_in_both_directions_and_backward_uses_the_quantized_factors():
    assert RECIPES["mxfp8"].make() == {"fp8_format": "E4M3", "backward_override": None}


@pytest.mark.usefixtures("engine")
def test_ranks_do_not_share_their_largest_values():
    assert RECIPES["fp8_delayed"].make() == {"reduce_amax": False}


def test_only_mxfp8_can_be_fused():
    assert [name for name, recipe in RECIPES.items() if recipe.fusible] == ["mxfp8"]
