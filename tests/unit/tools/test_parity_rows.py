"""Each quantity gets its verdict, and the tensor that is named is the one that differs."""

import math

import pytest

from tests.unit.tools.parity_findings import NAMES, OFF, TOLERANCES, figures, findings, reference
from tools.parity.comparison import Findings
from tools.parity.probe import GateProbe
from tools.parity.routing import Differences, Place
from tools.parity.rows import KINDS, Row, first_tensor, kind_of, measured_rounding, rows_of
from tools.parity.training import Figures


def failing(found: Findings) -> list[Row]:
    return [row for row in rows_of("a layout", found, reference(), TOLERANCES) if not row.ok]


def changed(**changes) -> Findings:
    other = figures()
    for name, value in changes.items():
        setattr(other, name, value)
    return findings(figures=[figures(), other])


def test_equal_findings_fail_nothing():
    assert failing(findings()) == []
    assert first_tensor(findings(), TOLERANCES) is None


def test_every_parameter_has_a_kind_and_every_kind_a_row():
    assert {kind_of(name) for name in NAMES} == set(KINDS)
    assert kind_of("layers.0.attention.q_norm.weight") == "norm"
    quantities = [row.quantity for row in rows_of("a layout", findings(), reference(), TOLERANCES)]
    assert [q for q in quantities if q.startswith("gradient")] == [f"gradient: {kind}" for kind in KINDS]


@pytest.mark.parametrize("name", ["loss", "aux_loss", "z_loss", "grad_norm"])
@pytest.mark.parametrize("value", [2.0, math.nan, math.inf])
def test_a_number_of_any_rank_that_differs_fails_its_row(name: str, value: float):
    scalars = figures().scalars
    scalars[1][name] = value
    assert [(row.quantity, row.tensor) for row in failing(changed(scalars=scalars))] == [(name, "step 2")]


def test_counts_must_be_equal():
    assert [row.quantity for row in failing(changed(tokens=[(90, 96), (92, 96)]))] == ["tokens per step"]
    (row,) = failing(changed(loads=[[[24, 24]], [[21, 27]]]))
    assert (row.quantity, row.tensor, row.difference) == ("expert load", "step 2", 1)


@pytest.mark.parametrize(
    ("step", "rows", "quantity", "sample"),
    [
        (0, {(0, "a"): 1, (1, "x"): 1}, "batches", 1),
        (1, {(2, "c"): 2, (3, "d"): 1}, "batches", 3),
        (1, {(2, "c"): 1}, "batches", 3),
        (2, {(4, "e"): 1, (7, "g"): 1}, "ids of the next batch", 5),
    ],
    ids=["other content", "read twice", "not read", "other ids"],
)
def test_another_batch_fails(step: int, rows: dict, quantity: str, sample: int):
    own: Figures = figures()
    own.rows[step] = rows
    (row,) = failing(findings(figures=[own, own]))
    assert (row.quantity, row.tensor) == (quantity, f"sample {sample}")


def test_rows_that_tp_ranks_share_are_the_same_batch():
    own = figures()
    own.rows = [dict.fromkeys(rows, 2) for rows in own.rows]
    assert failing(findings(figures=[own, own])) == []


def test_the_worst_tensor_is_in_the_row_and_the_first_in_the_summary():
    found = findings("layers.0.attention.q_proj.weight", "layers.1.attention.q_proj.weight")
    found.differences["gradients"]["layers.1.attention.q_proj.weight"] = found.differences["gradients"][
        "layers.0.attention.q_proj.weight"
    ]._replace(relative=0.2)
    (row,) = failing(found)
    assert (row.quantity, row.tensor) == ("gradient: attention", "layers.1.attention.q_proj.weight")
    assert first_tensor(found, TOLERANCES) == "gradient of layers.0.attention.q_proj.weight"


@pytest.mark.parametrize("kind", ["parameters", "exp_avg", "exp_avg_sq"])
def test_state_after_the_steps_has_its_row(kind: str):
    found = findings("norm.weight", kinds=(kind,))
    assert [row.tensor for row in failing(found)] == ["norm.weight"]
    assert "norm.weight" in str(first_tensor(found, TOLERANCES))


def test_gradients_that_were_never_compared_fail():
    found = findings()
    found.differences["parameters"].clear()
    assert [row.quantity for row in failing(found)] == ["parameters"]


def test_a_choice_beyond_rounding_fails_and_one_within_does_not():
    place = Place(2, 1, 3, 17)
    assert failing(findings(routing=Differences(100, 1, 9e-6, place))) == []
    (row,) = failing(findings(routing=Differences(100, 1, 2e-5, place)))
    assert row.tensor == "layers.1, step 2, sample 3, position 17"


@pytest.mark.parametrize(
    ("changes", "quantity"),
    [
        ({"initial": ["norm.weight"]}, "initial parameters"),
        ({"unequal_replicas": ["norm.weight"]}, "replicas"),
        ({"gate": GateProbe(0.5, 1e-7)}, "experts' function"),
    ],
)
def test_what_else_can_differ_has_its_row(changes: dict, quantity: str):
    assert [row.quantity for row in failing(findings(**changes))] == [quantity]


def test_the_gradients_norm_may_be_as_far_off_as_the_gradient_is_from_fp32():
    exact = findings("lm_head.weight", difference=OFF._replace(relative=0.3, norm=5.0))
    measured = measured_rounding(exact, reference())
    assert measured["scalars"]["grad_norm step 1"] == pytest.approx(0.3)
    assert measured["scalars"]["loss step 1"] == 0.0
    assert measured["gradients"]["lm_head.weight"] == 0.3
