"""Tables, JSON and chart say what was found, and outputs that cannot be written are refused early."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_framework.errors import ConfigError, DependencyError
from tools.benchmarks import report
from tools.benchmarks.dispatch import DispatchResult
from tools.benchmarks.expert_block import Options, Report
from tools.benchmarks.experts import ExpertsResult
from tools.benchmarks.machine import Machine
from tools.benchmarks.timing import Spread

OPTIONS = Options(
    device="cpu",
    tokens=32,
    hidden_size=16,
    intermediate_size=16,
    top_k=2,
    num_experts=(8,),
    ep=(2,),
    dtypes=("bf16",),
    warmup=1,
    repetitions=5,
    threads=None,
    seed=0,
)
MACHINE = Machine(
    cpu="Some CPU", cores=2, cpu_capability="AVX2", gpu=None, torch_version="2.11.0", threads=2, load_average=0.5
)
EXPERTS = ExpertsResult(
    num_experts=8,
    dtype="bf16",
    rows=64,
    gflop=1.0,
    seconds={"loop": Spread(0.04, 0.03, 0.05), "grouped_mm": Spread(0.02, 0.015, 0.025)},
    gflop_per_s={"loop": 25.0, "grouped_mm": 50.0},
    loop_over_grouped_mm=Spread(2.0, 1.5, 2.5),
    max_relative_difference=0.0,
)
DISPATCH = DispatchResult(
    ep=2,
    dtype="bf16",
    bytes_sent={
        "all_to_all": {"forward": 1.2e6, "backward": 0.8e6},
        "all_gather": {"forward": 1.6e6, "backward": 1.4e6},
    },
    max_bytes_sent={"all_to_all": 2_100_000, "all_gather": 3_000_000},
    seconds={"all_to_all": Spread(0.05, 0.04, 0.06), "all_gather": Spread(0.06, 0.05, 0.07)},
    all_gather_over_all_to_all_bytes=1.5,
    all_gather_over_all_to_all_seconds=Spread(1.2, 1.1, 1.3),
    max_relative_difference=0.0,
)
REPORT = Report(OPTIONS, "cpu", MACHINE, experts=[EXPERTS], dispatch=[DISPATCH], skipped=["a reason."])


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_markdown_table_is_padded_and_right_aligned():
    assert report.markdown_table(["E", "ms"], [["8", "1.25"], ["64", "10"]]).splitlines() == [
        "|  E |   ms |",
        "| -: | ---: |",
        "|  8 | 1.25 |",
        "| 64 |   10 |",
    ]


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        report.markdown_table(["E", "ms"], [["8"]])


def test_milliseconds_show_median_and_quartiles():
    assert report.milliseconds(Spread(0.0123, 0.011, 0.02)) == "12.3 (11.0 to 20.0)"
    assert report.milliseconds(Spread(0.00123, 0.001, 0.002)) == "1.23 (1.00 to 2.00)"


def test_report_has_the_numbers_of_every_comparison():
    lines = report.to_markdown(REPORT).splitlines()
    assert "2 cores of Some CPU (AVX2), torch 2.11.0, 2 threads, load average 0.5 at the start." in lines[2]
    rows = [cells(line) for line in lines if line.startswith("|")]
    assert rows[2] == [
        "8",
        "bf16",
        "40.0 (30.0 to 50.0)",
        "20.0 (15.0 to 25.0)",
        "2.00 (1.50 to 2.50)",
        "25.00",
        "50.00",
    ]
    assert rows[5] == [
        *("2", "bf16", "3.00", "2.00", "1.50"),
        *("60.0 (50.0 to 70.0)", "50.0 (40.0 to 60.0)", "1.20 (1.10 to 1.30)"),
    ]
    assert lines[-1] == "Skipped: a reason."


def test_a_part_without_results_has_no_table():
    text = report.to_markdown(replace(REPORT, dispatch=[]))
    assert "Experts" in text
    assert "Dispatch" not in text


def test_json_keeps_names_and_units(tmp_path: Path):
    report.write_json(REPORT, tmp_path / "x.json")
    read = json.loads((tmp_path / "x.json").read_text())
    assert read["benchmark"] == "expert-block"
    assert read["experts"][0]["seconds"]["loop"] == {"median": 0.04, "lower_quartile": 0.03, "upper_quartile": 0.05}
    assert read["dispatch"][0]["bytes_sent"]["all_to_all"] == {"forward": 1.2e6, "backward": 0.8e6}


@pytest.mark.parametrize("parts", [{}, {"dispatch": []}, {"experts": []}])
def test_chart_is_drawn_for_the_parts_that_ran(parts: dict, tmp_path: Path):
    pytest.importorskip("matplotlib")
    report.write_chart(replace(REPORT, **parts), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_folder_is_refused_before_measuring(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--json=.*: the folder .*nowhere does not exist\. Create it"):
        report.check_outputs(tmp_path / "nowhere" / "x.json", None)


def test_a_chart_without_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    report.check_outputs(tmp_path / "x.json", None)
    with pytest.raises(DependencyError, match=r"--chart=.* needs matplotlib.* Install '\.\[test\]'"):
        report.check_outputs(None, tmp_path / "x.png")
