"""The report says what failed, and ranks that end early cost their own layout alone."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from moe_framework.errors import ConfigError
from tests.distributed.check_parity_jobs import tiny_config
from tests.unit.tools.parity_findings import TOLERANCES, findings, reference
from tools.parity import execute
from tools.parity.comparison import findings_path
from tools.parity.layouts import parse_layouts
from tools.parity.plan import Case, Options, Plan, make_plan
from tools.parity.progress import Steps
from tools.parity.report import LayoutReport, Report, to_text, write_json
from tools.parity.rows import rows_of


def plan_of(layouts: str) -> Plan:
    return make_plan(tiny_config(), parse_layouts(layouts), Options(steps=1))


def report_of(*layouts: LayoutReport) -> Report:
    return Report(plan_of("ep=2"), "cpu", TOLERANCES, "loop", layouts)


def layout_report(name: str, *off: str) -> LayoutReport:
    rows = rows_of(name, findings(*off), reference(), TOLERANCES)
    return LayoutReport(name, tuple(rows), 100, 2, f"gradient of {off[0]}" if off else None)


def test_each_layout_has_its_verdict_and_each_failing_row_says_so():
    report = report_of(layout_report("first"), layout_report("second", "norm.weight"))
    text = to_text(report)
    assert not report.ok
    assert "first: ok" in text
    assert "second: DIFFERS" in text
    (line,) = [line for line in text.splitlines() if "DIFFERS" in line and "gradient" in line]
    assert line.split() == ["gradient:", "norm", "1.00e-01", "1.00e-05", "DIFFERS", "norm.weight"]
    assert "first tensor that differs: gradient of norm.weight" in text
    assert "replayed: 2 of 100" in text
    assert "1 of 2 layouts equal one rank within tolerance" in text


def test_ranks_that_ended_early_are_no_success(tmp_path: Path):
    report = report_of(layout_report("first"), LayoutReport("second", (), error="RuntimeError: boom"))
    assert not report.ok
    assert "its ranks ended early: RuntimeError: boom" in to_text(report)
    write_json(report, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ok"] is False
    assert [layout["ok"] for layout in found["layouts"]] == [True, False]


def test_a_file_that_cannot_be_written_is_a_user_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="--json="):
        write_json(report_of(layout_report("first")), tmp_path / "no" / "found.json")


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
