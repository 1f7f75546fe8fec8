"""Patterns of what differs, and the fault that each is taken for."""

from dataclasses import replace

import pytest

from tests.unit.tools.parity_findings import NAMES, OFF, TOLERANCES, figures, findings, reference
from tools.parity.comparison import Findings
from tools.parity.diagnosis import explain, looks_like
from tools.parity.probe import GateProbe
from tools.parity.rows import rows_of
from tools.parity.tensors import Difference

DOUBLED = Difference(1.0, 2.0, 1e-7, 0.02)
EXPERTS = tuple(name for name in NAMES if ".experts." in name)
ROUTERS = tuple(name for name in NAMES if ".router." in name)
BEFORE_LAST_ROUTER = tuple(name for name in NAMES[:-2] if not name.startswith("layers.1.moe.experts"))


def named(found: Findings) -> str | None:
    return looks_like(found, rows_of("a layout", found, reference(), TOLERANCES), TOLERANCES)


def with_wrong(scalar: str, step: int, **changes) -> Findings:
    own = figures()
    own.scalars[step - 1][scalar] *= 1.5
    return findings(figures=[own, own], **changes)


def test_nothing_that_differs_looks_like_nothing():
    assert named(findings()) is None


def test_multiples_of_the_experts_gradients_are_a_divisor():
    found = findings(*EXPERTS, difference=DOUBLED)
    assert named(found) == "expert_divisor"
    assert explain("expert_divisor", found, TOLERANCES).endswith("(they are 2 times the reference's)")


def test_other_errors_of_the_experts_gradients_are_no_divisor():
    assert named(findings(*EXPERTS, difference=OFF)) is None


def test_a_multiple_of_all_gradients_is_no_divisor_of_the_experts():
    assert named(findings(*NAMES, difference=DOUBLED)) is None


def test_a_router_alone_with_diverged_copies_is_a_missing_sum_over_tp():
    diverged = [ROUTERS[0], f"exp_avg of {ROUTERS[0]}"]
    assert named(findings(*ROUTERS, unequal_replicas=diverged)) == "router_tp_sum"


def test_a_tensor_that_moved_weights_excuse_does_not_hide_a_fault():
    excused = "layers.0.attention_norm.weight"
    found = findings(*ROUTERS, unequal_replicas=[ROUTERS[0]])
    found.differences["gradients"][excused] = Difference(2e-5, 1.0, 2e-5, 0.02)
    assert named(found) != "router_tp_sum"
    moved = replace(TOLERANCES, moved={"gradients": {excused: 1e-5}})
    assert looks_like(found, rows_of("a layout", found, reference(), moved), moved) == "router_tp_sum"


def test_only_what_lies_before_a_router_is_its_loss():
    assert named(findings(*BEFORE_LAST_ROUTER)) == "aux_dp"


@pytest.mark.parametrize("name", ["lm_head.weight", "norm.weight", "layers.1.moe.experts.down"])
def test_what_lies_behind_the_last_router_is_not_its_loss(name: str):
    assert named(findings(*BEFORE_LAST_ROUTER, name)) is None


def test_a_wrong_loss_is_not_the_routers_loss():
    own = figures()
    own.scalars[0]["loss"] = 5.0
    assert named(findings(*BEFORE_LAST_ROUTER, figures=[own, own])) is None


def test_a_wrong_norm_of_right_gradients_is_a_sum_that_is_missing_in_the_norm():
    found = with_wrong("grad_norm", 1, kinds=("exp_avg",), unequal_replicas=["norm.weight"])
    assert named(found) == "norm_ep_sum"


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
def test_wrong_moments_of_right_gradients_are_stale(kind: str):
    found = findings("norm.weight", kinds=(kind,))
    assert named(found) == "stale_moment"
    assert explain("stale_moment", found, TOLERANCES).endswith(f"(most in {kind} of norm.weight)")


def test_copies_that_differ_while_all_else_is_right_have_drifted():
    assert named(findings(unequal_replicas=["norm.weight"])) == "replica_drift"


def test_exchanged_gate_and_up_are_known_by_the_experts_function_or_by_the_first_weights():
    assert named(findings(*NAMES, gate=GateProbe(0.5, 1e-7))) == "gate_up_swap"
    assert named(findings(*NAMES, initial=["layers.0.moe.experts.gate_up swapped"])) == "gate_up_swap"
    assert named(findings(*NAMES, gate=GateProbe(0.5, 0.6))) is None
