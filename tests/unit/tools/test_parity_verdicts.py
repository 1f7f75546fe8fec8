"""Which tensors make the reference run again with moved weights, and what its movement then allows."""

import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.check_parity_jobs import tiny_config
from tests.unit.tools.parity_findings import EQUAL, NAMES, ONE_RANK, findings
from tools.parity.comparison import Findings, findings_path, moved_path
from tools.parity.layouts import parse_layouts
from tools.parity.plan import Options, Plan, make_plan
from tools.parity.report import LayoutReport, Move
from tools.parity.verdicts import case_to_move, judge, tolerances_of

NORM, ROUTER = "layers.0.moe_norm.weight", "layers.1.moe.router.weight"
BEYOND = EQUAL._replace(relative=3e-5)


def planned(layouts: str = "ep=2", *changes: str) -> Plan:
    return make_plan(tiny_config(*changes), parse_layouts(layouts), Options(steps=2))


def write(folder: Path, *of_layouts: Findings) -> None:
    for number, found in enumerate(of_layouts):
        findings_path(folder, number).write_bytes(pickle.dumps(found))


def write_moves(folder: Path, name: str, *distances: float, kind: str = "gradients") -> None:
    moves = [findings(name, kinds=(kind,), difference=EQUAL._replace(relative=d)) for d in distances]
    moved_path(folder, "one rank").write_bytes(pickle.dumps(moves))


def judged(folder: Path, number: int = 0, plan: Plan | None = None) -> LayoutReport:
    plan = plan or planned()
    return judge(plan.cases[number], folder, number, ONE_RANK, tolerances_of(plan, ONE_RANK, folder), None)


def wanted(folder: Path, plan: Plan) -> list[str] | None:
    case = case_to_move(plan, ONE_RANK, folder)
    return None if case is None else case[1]


def test_nothing_is_run_again_where_all_is_within_the_flat_tolerance(tmp_path: Path):
    within = EQUAL._replace(relative=0.99e-5)
    write(tmp_path, findings(), findings(*NAMES, kinds=("gradients", "exp_avg", "exp_avg_sq"), difference=within))
    assert wanted(tmp_path, planned("ep=2;dp=2")) is None
    assert judged(tmp_path).moves == ()


def test_the_tensors_of_all_layouts_are_asked_about_once(tmp_path: Path):
    plan = planned("ep=2;dp=2;tp=2")
    write(tmp_path, findings(ROUTER, difference=BEYOND), findings(ROUTER, NORM, difference=BEYOND))
    case_and_names = case_to_move(plan, ONE_RANK, tmp_path)
    assert case_and_names is not None
    case, names = case_and_names
    assert sorted(names) == [f"gradient of {NORM}", f"gradient of {ROUTER}"]
    assert (case.config, case.layout.world_size) == (plan.references["one rank"], 1)


@pytest.mark.parametrize("kind", ["gradients", "exp_avg", "exp_avg_sq"])
def test_a_row_that_no_rounding_excuses_is_not_asked_about(tmp_path: Path, kind: str):
    found = findings(NORM, kinds=(kind,), difference=BEYOND)
    found.differences[kind]["norm.weight"] = EQUAL._replace(relative=1.01e-4)
    write(tmp_path, found)
    assert wanted(tmp_path, planned()) is None
    found.differences[kind]["norm.weight"] = EQUAL._replace(relative=0.99e-4)
    write(tmp_path, found)
    assert wanted(tmp_path, planned()) is not None


@pytest.mark.parametrize("difference", [math.inf, math.nan])
def test_numbers_that_are_not_finite_are_not_asked_about(tmp_path: Path, difference: float):
    write(tmp_path, findings(NORM, difference=EQUAL._replace(relative=difference)))
    assert wanted(tmp_path, planned()) is None


def test_other_precisions_have_a_measure_of_their_own(tmp_path: Path):
    write(tmp_path, findings(NORM, kinds=("parameters",), difference=BEYOND))
    # With so small a learning rate, parameters have the same tolerance in every precision.
    for mode, again in (("bf16", False), ("fp32", True)):
        plan = planned("ep=2", f"precision.mode={mode}", "optim.lr=1e-9", "optim.min_lr=1e-9")
        assert (wanted(tmp_path, plan) is not None) == again


def test_only_the_reference_of_the_doubtful_layout_is_run_again(tmp_path: Path):
    plan = make_plan(
        tiny_config("moe.aux_loss=global_batch"), parse_layouts("ep=2"), Options(steps=2, accumulation=(1, 2))
    )
    write(tmp_path, findings(), findings(NORM, difference=BEYOND))
    wanted_by = [case_to_move(plan, replace(ONE_RANK, folder=Path(f"{n} micro-steps")), tmp_path) for n in (1, 2)]
    assert [wanted is not None for wanted in wanted_by] == [False, True]


def test_a_tensor_may_be_four_times_as_far_as_the_farthest_move(tmp_path: Path):
    write(tmp_path, findings(NORM, difference=BEYOND))
    write_moves(tmp_path, NORM, 2e-6, 8e-6, 1e-6, 3e-6)
    report = judged(tmp_path)
    assert report.ok
    assert report.moves == (Move(f"gradient of {NORM}", 3e-5, 8e-6, 4 * 8e-6),)
    (row,) = [row for row in report.rows if row.quantity == "gradient: norm"]
    assert (row.tensor, row.difference, row.tolerance) == (NORM, 3e-5, pytest.approx(3.2e-5))


@pytest.mark.parametrize("moves", [(0.0, 7e-6), (9e-6, math.nan), (math.nan, 9e-6), (9e-6, math.inf)])
def test_a_tensor_that_moves_too_little_or_to_no_number_differs_and_says_so(tmp_path: Path, moves: tuple[float, ...]):
    write(tmp_path, findings(NORM, difference=BEYOND))
    write_moves(tmp_path, NORM, *moves)
    report = judged(tmp_path)
    assert not report.ok
    assert report.first_tensor == f"gradient of {NORM}"
    assert [entry.tensor for entry in report.moves] == [f"gradient of {NORM}"]


def test_a_move_of_one_kind_or_tensor_excuses_no_other(tmp_path: Path):
    write(tmp_path, findings(NORM, kinds=("exp_avg",), difference=BEYOND))
    write_moves(tmp_path, NORM, 9e-6, kind="gradients")
    assert judged(tmp_path).first_tensor == f"Adam's first moment of {NORM}"
    write_moves(tmp_path, ROUTER, 9e-6, kind="exp_avg")
    assert judged(tmp_path).first_tensor == f"Adam's first moment of {NORM}"
    write_moves(tmp_path, NORM, 9e-6, kind="exp_avg")
    assert judged(tmp_path).ok


def test_a_layout_within_the_flat_tolerance_shows_no_move_of_another(tmp_path: Path):
    plan = planned("ep=2;dp=2")
    write(tmp_path, findings(NORM, difference=BEYOND), findings())
    write_moves(tmp_path, NORM, 9e-6)
    assert len(judged(tmp_path, 0, plan).moves) == 1
    assert judged(tmp_path, 1, plan).moves == ()


def off(found: Findings, name: str, by: float) -> Findings:
    for figures in found.figures:
        figures.scalars[0][name] *= 1 + by
    return found


def test_the_gradient_norm_may_be_as_far_as_its_own_moves_allow(tmp_path: Path):
    write(tmp_path, off(findings(), "grad_norm", 3e-5))
    assert wanted(tmp_path, planned()) == ["grad_norm step 1"]
    for move, ok in ((9e-6, True), (5e-6, False)):
        moved_path(tmp_path, "one rank").write_bytes(pickle.dumps([off(findings(), "grad_norm", move)]))
        report = judged(tmp_path)
        assert report.ok == ok
        assert [entry.tensor for entry in report.moves] == ["grad_norm step 1"]
    write(tmp_path, off(findings(), "grad_norm", 1.1e-4))
    assert wanted(tmp_path, planned()) is None


@pytest.mark.parametrize("name", ["loss", "aux_loss", "z_loss"])
def test_losses_keep_the_flat_tolerance(tmp_path: Path, name: str):
    write(tmp_path, off(findings(), name, 2e-5))
    assert wanted(tmp_path, planned()) is None
    moved_path(tmp_path, "one rank").write_bytes(pickle.dumps([off(findings(), name, 2e-5)]))
    assert [row.quantity for row in judged(tmp_path).rows if not row.ok] == [name]
