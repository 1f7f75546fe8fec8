"""What a soak plans, and what it makes of the runs' files: it must see every loss."""

import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tools.soaking import faults, report
from tools.soaking.faults import FAILED_SAVE, KINDS, Fault, Suffered

LOSSES = {1: 2.5, 2: 2.25, 3: 2.0}


def test_a_plan_has_every_kind_as_often_and_depends_on_the_seed_alone():
    planned = faults.plan(20, 3, num_ranks=2, num_layers=4)
    assert planned == faults.plan(20, 3, num_ranks=2, num_layers=4)
    assert planned != faults.plan(20, 4, num_ranks=2, num_layers=4)
    assert Counter(fault.kind for fault in planned) == dict.fromkeys(KINDS, 4)
    steps = [fault.step for fault in planned]
    gaps = [later - earlier for earlier, later in zip([1, *steps], steps, strict=False)]
    assert all(faults.LEAST_GAP <= gap <= faults.LARGEST_GAP for gap in gaps)
    assert {fault.rank for fault in planned} == {0, 1}


def test_a_plan_survives_its_file(tmp_path: Path):
    planned = faults.plan(5, 0, num_ranks=4, num_layers=2)
    faults.write_plan(planned, tmp_path / "plan.json")
    assert faults.read_plan(tmp_path / "plan.json") == planned


def judged(folder: Path, **changes: Any) -> report.Soak:
    """One SIGKILL in step 3, at second 100, with step 2 complete; the next start, at second 112, goes on from there."""
    setting: dict[str, Any] = {
        "found": LOSSES,
        "kind": "SIGKILL",
        "resumed": 2,
        "exit_code": 0,
        "left_over": [],
        "suffered": [Suffered(number=0, time=100.0, newest_step=2)],
    } | changes
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in setting["found"].items()]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "lo']))
    starts = [(50.0, 0), (112.0, setting["resumed"])]
    record = [{"time": datetime.fromtimestamp(at, UTC).isoformat(), "step": step} for at, step in starts]
    (folder / "run.json").write_text(json.dumps({"starts": record}))
    return report.judge(
        [Fault(number=0, kind=setting["kind"], rank=1, step=3)],
        setting["suffered"],
        launcher="torchrun",
        seed=0,
        exit_code=setting["exit_code"],
        run_dir=folder,
        expected=LOSSES,
        left_over=setting["left_over"],
    )


def test_a_run_that_lost_nothing_is_ok_with_its_recovery_time(tmp_path: Path):
    found = report.to_json(judged(tmp_path))
    assert found["ok"]
    assert found["losses_equal"]
    assert found["complete_steps_lost"] == 0
    assert (found["faults"], found["by_kind"]) == (1, {"SIGKILL": 1})
    assert found["recovery_s"]["median"] == found["recovery_s"]["max"] == pytest.approx(12.0)
    assert found["starts"] == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"found": LOSSES | {2: 2.2500001}}, "differ in steps (2,)"),
        ({"found": {1: 2.5, 2: 2.25}}, "differ in steps (3,)"),
        ({"resumed": 1}, "complete steps lost: 1"),
        ({"exit_code": 1}, "ended with code 1"),
        ({"left_over": ["process 5: python"]}, "left over: process 5: python"),
        ({"suffered": []}, "0 of 1 faults"),
        ({"suffered": [Suffered(number=0, time=120.0, newest_step=2)]}, "complete steps lost: 1"),
    ],
    ids=["other loss", "missing step", "older step", "failed", "left over", "no fault", "never started again"],
)
def test_whatever_is_lost_is_said(tmp_path: Path, changes: dict[str, Any], said: str):
    found = judged(tmp_path, **changes)
    assert not found.ok
    assert said in report.to_text(found)
    assert report.to_text(found).endswith("NOT OK")


def test_a_failed_save_needs_no_recovery_and_must_not_cost_a_step(tmp_path: Path):
    found = report.to_json(judged(tmp_path, kind=FAILED_SAVE))
    assert found["ok"]
    assert found["recovery_s"]["by_kind"][FAILED_SAVE] == {"median": None, "max": None}
    assert not report.to_json(judged(tmp_path, kind=FAILED_SAVE, resumed=1))["ok"]
