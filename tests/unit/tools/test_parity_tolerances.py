"""Tolerances follow from the precision; none is wider than its derivation."""

import math
from dataclasses import replace

import pytest

from tests.distributed.check_parity_jobs import tiny_config
from tools.parity.tolerances import derive, move_bound

RATES = [1e-4, 2e-4]


def test_fp32_allows_a_hundred_thousandth_of_everything():
    found = derive(tiny_config(), [1e-5])
    assert {found.scalar, found.tensor, found.square, found.routing, found.parameter(0.02)} == {1e-5}


@pytest.mark.parametrize("mode", ["bf16", "mxfp8_emulated", "auto8"])
def test_bf16_activations_allow_their_rounding_through_the_depth(mode: str):
    unit = 2**-8
    shallow = derive(tiny_config(f"precision.mode={mode}"), RATES)
    deep = derive(tiny_config(f"precision.mode={mode}", "model.num_layers=8"), RATES)
    assert shallow.unit == unit
    assert shallow.tensor == pytest.approx(2 * unit / 3**0.5 * 8**0.5)
    assert deep.tensor == pytest.approx(2 * shallow.tensor)
    assert shallow.scalar < shallow.tensor < shallow.square


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_a_parameter_may_differ_by_the_updates_of_a_share_of_its_elements(mode: str):
    found = derive(tiny_config(f"precision.mode={mode}"), [1e-2, 2e-2])
    assert found.rounding == pytest.approx(2 * found.unit / 3**0.5 * 8**0.5)
    assert found.parameter(0.02) == pytest.approx(2 * 3e-2 * found.rounding**0.5 / 0.02)
    assert found.parameter(0.04) == pytest.approx(found.parameter(0.02) / 2)
    assert found.parameter(0.0) == 1e-5


def test_a_tensor_that_rounding_moves_more_may_differ_by_twice_two_such_moves():
    measured = {
        "gradients": {"norm.weight": 0.15, "embed.weight": 1e-4},
        "scalars": {"loss step 1": 0.05, "grad_norm step 1": 0.2},
    }
    found = derive(tiny_config("precision.mode=bf16"), RATES, measured)
    assert found.of("gradients", "norm.weight") == pytest.approx(0.3 * 2**0.5)
    assert found.of("gradients", "embed.weight") == found.of("gradients", "lm_head.weight") == found.tensor
    assert found.of("exp_avg_sq", "norm.weight") == found.square
    assert found.of("parameters", "norm.weight", 0.02) == found.parameter(0.02)
    assert found.of("scalars", "loss step 1") == pytest.approx(0.1 * 2**0.5)
    assert found.of("scalars", "grad_norm step 1") == 0.25
    assert found.of("scalars", "loss step 2") == found.scalar
    assert found.of("routing", "gap") == found.routing


@pytest.mark.parametrize("measured", [math.inf, math.nan])
def test_a_reference_that_is_not_finite_allows_no_more_than_its_format(measured: float):
    found = derive(tiny_config("precision.mode=bf16"), RATES, {"scalars": {"loss step 2": measured}})
    assert found.of("scalars", "loss step 2") == found.scalar


def test_no_measurement_allows_half_of_a_tensor():
    found = derive(tiny_config("precision.mode=bf16"), RATES, {"function": {"gate": 1.4}})
    assert found.of("function", "gate") == 0.5


def test_a_move_of_the_weights_allows_four_times_itself_and_at_most_a_ten_thousandth():
    assert move_bound(6e-6) == pytest.approx(2.4e-5)
    assert move_bound(3e-5) == move_bound(1.0) == 1e-4
    assert {move_bound(value) for value in (0.0, math.inf, math.nan)} == {0.0}


def test_a_move_widens_the_flat_tolerance_of_its_tensor_and_never_narrows_one():
    flat = derive(tiny_config(), [1e-5])
    found = replace(flat, moved={"gradients": {"norm.weight": 6e-6, "embed.weight": 1e-7}})
    assert found.of("gradients", "norm.weight") == pytest.approx(2.4e-5)
    assert found.of("gradients", "embed.weight") == found.of("exp_avg", "norm.weight") == 1e-5
    assert found.of("scalars", "loss step 1") == 1e-5
    fast = replace(derive(tiny_config(), [1e-1]), moved={"parameters": {"norm.weight": 6e-6}})
    assert fast.of("parameters", "norm.weight", 0.02) == fast.parameter(0.02) > 1e-4
