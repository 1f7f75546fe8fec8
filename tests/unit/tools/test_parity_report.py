"""The report says what failed, and why what is beyond the flat tolerance did not."""

import json
from pathlib import Path

import pytest

from moe_framework.errors import ConfigError
from tests.distributed.check_parity_jobs import tiny_config
from tests.unit.tools.parity_findings import TOLERANCES, findings, reference
from tools.parity.layouts import parse_layouts
from tools.parity.plan import Options, make_plan
from tools.parity.report import MOVES_SHOWN, LayoutReport, Move, Report, to_text, write_json
from tools.parity.rows import rows_of


def report_of(*layouts: LayoutReport) -> Report:
    plan = make_plan(tiny_config(), parse_layouts("ep=2"), Options(steps=1))
    return Report(plan, "cpu", TOLERANCES, "loop", layouts)


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


def test_moves_of_the_reference_are_shown_with_what_they_allow(tmp_path: Path):
    moves = (
        Move("gradient of norm.weight", 3e-5, 8e-6, 3.2e-5),
        Move("gradient of embed.weight", 5e-5, 1e-6, 1e-5),
    )
    report = report_of(layout_report("first"), LayoutReport("second", (), moves=moves))
    text = to_text(report)
    assert "4 times the farthest that the reference went from itself in 4 runs" in text
    assert (
        "ill-conditioned? ok: gradient of norm.weight 3.00e-05, the reference with moved weights 8.00e-06, "
        "tolerance 3.20e-05" in text
    )
    assert "ill-conditioned? DIFFERS: gradient of embed.weight" in text
    write_json(report, tmp_path / "found.json")
    layouts = json.loads((tmp_path / "found.json").read_text())["layouts"]
    assert [len(layout["moves"]) for layout in layouts] == [0, 2]
    assert layouts[1]["moves"][0] == {
        "tensor": "gradient of norm.weight",
        "difference": 3e-5,
        "moved": 8e-6,
        "tolerance": 3.2e-5,
    }


def test_a_report_without_moves_does_not_speak_of_them():
    text = to_text(report_of(layout_report("first")))
    assert "moved" not in text
    assert "ill-conditioned" not in text


def test_many_moves_are_counted():
    moves = tuple(Move(f"gradient of {n}", 3e-5, 1e-6, 1e-5) for n in range(MOVES_SHOWN + 3))
    text = to_text(report_of(LayoutReport("first", (), moves=moves)))
    assert text.count("ill-conditioned?") == MOVES_SHOWN
    assert "and 3 more such, which --json lists" in text


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
