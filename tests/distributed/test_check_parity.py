"""The parity check: right layouts pass at every seed, and every known fault is caught and named."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.check_parity_jobs import (
    ILL_CONDITIONED,
    TINY,
    judged,
    layouts_job,
    moved_job,
    planned,
    reference_job,
)
from tests.helpers.pool import RankPool
from tests.helpers.tiny_runs import ROOT
from tools.parity import tolerances
from tools.parity.comparison import Findings, moved_path
from tools.parity.known_faults import KNOWN_FAULTS
from tools.parity.layouts import parse_layouts
from tools.parity.plan import Plan, by_world_size, moved_case
from tools.parity.reference import TENSORS, read_reference
from tools.parity.report import LayoutReport
from tools.parity.verdicts import case_to_move

# Each axis alone and with another, within four ranks.
SHORT = "dp=2;ep=2;tp=2;dp=2,dp_replicate=2;tp=2,expert_tp=2;dp=2,ep=2;ep=2,tp=2"
UP_TO_FOUR = (
    f"{SHORT};dp=1;dp=4;ep=4;tp=4;dp=2,tp=2;dp=4,dp_replicate=2;dp=2,ep=2,dp_replicate=2;dp=2,tp=2,dp_replicate=2;"
    "tp=4,expert_tp=4;ep=2,tp=2,expert_tp=2;dp=2,tp=2,expert_tp=2"
)
# Where each fault is possible with two ranks.
FAULTS = {
    "expert_divisor": "ep=2;dp=2",
    "router_tp_sum": "tp=2",
    "norm_ep_sum": "ep=2",
    "aux_dp": "ep=2;tp=2",
    "gate_up_swap": "dp=2;tp=2,expert_tp=2",
    "stale_moment": "ep=2",
    "replica_drift": "dp=2,dp_replicate=2",
}


def checked(ranks: RankPool, plan: Plan, folder: Path) -> list[LayoutReport]:
    ranks.run(reference_job, 1, plan, folder)
    for world_size, cases in by_world_size(plan.cases):
        ranks.run(layouts_job, world_size, plan, folder, [plan.cases.index(case) for case in cases], timeout_s=280)
    for name in plan.references:
        wanted = case_to_move(plan, read_reference(folder / name), folder)
        if wanted is not None:
            ranks.run(moved_job, 1, plan, folder, wanted[0])
    return judged(plan, folder)


def assert_ok(layouts: list[LayoutReport]) -> None:
    wrong = {layout.layout: [row for row in layout.rows if not row.ok] for layout in layouts if not layout.ok}
    assert not wrong


@pytest.mark.slow
def test_layouts_equal_one_rank(ranks: RankPool, tmp_path: Path):
    layouts = checked(ranks, planned(tmp_path, SHORT, steps=3), tmp_path)
    assert_ok(layouts)
    assert [layout.layout for layout in layouts] == [str(layout) for layout in parse_layouts(SHORT)]
    assert all(layout.first_tensor is None and layout.looks_like is None for layout in layouts)
    quantities = {row.quantity for row in layouts[0].rows}
    assert {"loss", "aux_loss", "z_loss", "grad_norm", "parameters", "replicas", "ids of the next batch"} <= quantities
    kinds = ("embedding", "head", "norm", "router", "attention", "expert gate_up", "expert down")
    assert {f"gradient: {kind}" for kind in kinds} <= quantities


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        (("moe.aux_loss=global_batch",), {"accumulation": (1, 2)}),
        (("train.activation_checkpointing=full", "model.tie_embeddings=true"), {"accumulation": (2,)}),
        (("train.activation_checkpointing=selective", "model.qk_norm=true"), {}),
        (("precision.mode=bf16",), {}),
        (("precision.mode=mxfp8_emulated", "model.hidden_size=64", "model.intermediate_size=32"), {}),
    ],
    ids=["global_batch", "full", "selective", "bf16", "mxfp8"],
)
def test_options_of_training_pass(ranks: RankPool, tmp_path: Path, changes: tuple[str, ...], options: dict):
    assert_ok(checked(ranks, planned(tmp_path, "ep=2;tp=2", *changes, **options), tmp_path))


@pytest.mark.parametrize(
    "name", [name if name == "aux_dp" else pytest.param(name, marks=pytest.mark.slow) for name in KNOWN_FAULTS]
)
def test_a_fault_is_caught_and_named_even_where_all_tensors_are_excused(ranks: RankPool, tmp_path: Path, name: str):
    plan = planned(tmp_path, FAULTS[name], inject=name)
    for layout in checked(ranks, plan, tmp_path) + judged(plan, tmp_path, all_excused=True):
        assert not layout.ok
        assert layout.looks_like is not None
        assert layout.looks_like.split(":")[0] == name, layout
        # Drift below the tolerance of any tensor is seen by the copies' bits alone.
        assert (layout.first_tensor is None) == (name == "replica_drift")


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN_FAULTS)
def test_a_fault_is_named_on_ill_conditioned_inputs(ranks: RankPool, tmp_path: Path, name: str):
    plan = planned(tmp_path, FAULTS[name], *ILL_CONDITIONED, inject=name)
    for layout in checked(ranks, plan, tmp_path) + judged(plan, tmp_path, all_excused=True):
        assert not layout.ok
        assert layout.looks_like is not None
        assert layout.looks_like.split(":")[0] == name, layout


@pytest.mark.slow
def test_the_reference_moves_by_rounding_alone(ranks: RankPool, tmp_path: Path):
    # A fault of the layouts is none of the reference, whatever its weights.
    plan = planned(tmp_path, "ep=2", inject="stale_moment")
    ranks.run(reference_job, 1, plan, tmp_path)
    ((name, config),) = plan.references.items()
    ranks.run(moved_job, 1, plan, tmp_path, moved_case(name, config))
    reference = read_reference(tmp_path / name)
    moves: list[Findings] = pickle.loads(moved_path(tmp_path, name).read_bytes())
    assert len(moves) == tolerances.NUM_MOVES
    for found in moves:
        assert set(found.initial) == set(reference.tensors("parameters"))
        assert (found.figures[0].rows, found.figures[0].loads) == (reference.figures.rows, reference.figures.loads)
        assert found.routing.choices > 0
        for kind in TENSORS:
            distances = [difference.relative for difference in found.differences[kind].values()]
            assert all(1e-9 < distance < 1e-5 for distance in distances), kind
    assert len({found.differences["gradients"]["embed.weight"] for found in moves}) == len(moves)


@pytest.mark.slow
def test_a_layout_is_about_as_far_as_the_reference_moves(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # No model is so well-conditioned that a layout's tensors agree to this.
    monkeypatch.setattr(tolerances, "FP32", 2.0**-23)
    (layout,) = checked(ranks, planned(tmp_path, "tp=2", "model.qk_norm=true"), tmp_path)
    assert len(layout.moves) > 3
    assert all(move.difference <= move.tolerance == pytest.approx(4 * move.moved) for move in layout.moves)
    tensors = [row for row in layout.rows if row.quantity.startswith(("gradient", "parameters", "Adam"))]
    assert len(tensors) == 10
    assert all(row.ok for row in tensors)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_layout_up_to_four_ranks(ranks: RankPool, tmp_path: Path):
    plan = planned(tmp_path, UP_TO_FOUR, "train.activation_checkpointing=full", accumulation=(1, 2))
    assert_ok(checked(ranks, plan, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("seed", "changes"),
    [*((seed, ()) for seed in range(20)), *((seed, ILL_CONDITIONED) for seed in range(6))],
    ids=lambda value: value if isinstance(value, int) else "ill-conditioned" if value else "",
)
def test_no_false_alarm_at_any_seed(ranks: RankPool, tmp_path: Path, changes: tuple[str, ...], seed: int):
    assert_ok(checked(ranks, planned(tmp_path, "dp=2;ep=2;tp=2;dp=2,dp_replicate=2", *changes, seed=seed), tmp_path))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "tools/check_parity.py", "--config-name", "L0_sanity", "--steps", "1", *arguments, *TINY]
    return subprocess.run(start, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_the_command_writes_its_verdicts_and_ends_with_0(tmp_path: Path):
    path = tmp_path / "parity.json"
    done = command("--layouts", "dp=1,ep=2,tp=1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "dp=1,ep=2,tp=1: ok" in done.stdout
    assert "1 of 1 layouts equal one rank within tolerance" in done.stdout
    assert "FutureWarning" not in done.stderr
    found = json.loads(path.read_text())
    assert found["ok"] is True
    assert found["rows"]
    for row in found["rows"]:
        assert set(row) == {"layout", "quantity", "tensor", "difference", "tolerance", "ok"}
        assert row["ok"] is True
        assert row["layout"] == "dp=1,ep=2,tp=1"
    assert found["options"]["steps"] == 1
    assert found["layouts"][0]["choices"] > 0


@pytest.mark.slow
def test_the_command_names_an_injected_fault_and_ends_with_1():
    done = command("--layouts", "ep=2", "--inject", "expert_divisor")
    assert done.returncode == 1, done.stderr
    assert "looks like: expert_divisor" in done.stdout
    assert "(they are 2 times the reference's)" in done.stdout
    assert "first tensor that differs: gradient of layers.0.moe.experts.gate_up" in done.stdout


@pytest.mark.slow
def test_data_that_cannot_be_read_is_a_user_error():
    done = command("--layouts", "ep=2", "--data", "config", "data.path=/no/such.fa")
    assert done.returncode == 2
    assert "DataError: data.path=/no/such.fa" in done.stderr
