"""Ranks that end early cost their own layout alone, and the reference runs again only where that can help."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from tests.distributed.check_parity_jobs import tiny_config
from tests.unit.tools.parity_findings import EQUAL, ONE_RANK, findings
from tools.parity import execute
from tools.parity.comparison import findings_path, run_moved
from tools.parity.layouts import parse_layouts
from tools.parity.plan import Case, Options, Plan, make_plan
from tools.parity.progress import Steps


def plan_of(layouts: str) -> Plan:
    return make_plan(tiny_config(), parse_layouts(layouts), Options(steps=1))


def test_layouts_after_one_whose_ranks_end_early_are_run_by_new_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    started: list[list[int]] = []

    def run(_function: Any, _ranks: int, _device: str, cases: list[tuple[int, Case]], *_: Any) -> None:
        started.append([number for number, _ in cases])
        for number, case in cases:
            if case.layout.dp == 2:
                raise ProcessRaisedException("-- Process 1 terminated\nRuntimeError: boom\n", 1, 1)
            findings_path(tmp_path, number).write_bytes(pickle.dumps(findings()))

    monkeypatch.setattr(execute, "run_on_ranks", run)
    plan = plan_of("ep=2;dp=2;tp=2;dp=1")
    errors = execute._run_layouts(plan, "cpu", tmp_path, Steps.starting_now(4))
    assert errors == {1: "RuntimeError: boom"}
    assert started == [[3], [0, 1, 2], [2]]


@pytest.mark.parametrize("difference", [0.9e-5, 3e-5, 1.1e-4])
def test_the_reference_runs_again_only_for_what_its_moves_may_excuse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, difference: float
):
    started: list[tuple[Any, int, str]] = []

    def run(function: Any, ranks: int, _device: str, case: Case, *_: Any) -> None:
        started.append((function, ranks, case.reference))

    monkeypatch.setattr(execute, "run_on_ranks", run)
    found = findings("norm.weight", difference=EQUAL._replace(relative=difference))
    findings_path(tmp_path, 0).write_bytes(pickle.dumps(found))
    steps = Steps.starting_now(2)
    execute._run_moved(plan_of("ep=2"), ONE_RANK, "cpu", tmp_path, steps)
    again = difference == 3e-5
    assert started == ([(run_moved, 1, "one rank")] if again else [])
    assert (steps.total, steps.done) == ((6, 4) if again else (2, 0))
