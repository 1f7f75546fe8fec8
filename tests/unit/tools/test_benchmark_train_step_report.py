"""The tables, ratios, JSON and chart of train-step."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from tests.unit.tools.test_benchmark_train_step_options import resolved
from tools.benchmarks.machine import Machine
from tools.benchmarks.timing import Spread
from tools.benchmarks.train_step import report
from tools.benchmarks.train_step.contender import Facts
from tools.benchmarks.train_step.measure import Row
from tools.benchmarks.train_step.session import Report, with_ratios

MACHINE = Machine(
    cpu="Some CPU", cores=2, cpu_capability="AVX2", gpu="Some GPU", torch_version="2.11.0", threads=2, load_average=0.5
)


def row(name: str, rate: float, facts: Facts) -> Row:
    return Row(
        name,
        facts=facts,
        num_parameters=1234,
        step_seconds=[0.5],
        seconds=Spread.of([0.5]),
        tokens_per_second_per_gpu=rate,
        model_flops_per_second_per_gpu=3e12,
        peak_bytes=2_500_000_000,
        first_loss=2.0,
        last_loss=1.5,
    )


PEER = row("hf_eager", 100.0, Facts("bf16", "none", False, "bf16", "the peer", "eager"))
OURS = row("ours:bf16", 150.0, Facts("bf16", "fp32", True, "fp32", "", "FSDP2"))
FAILED = Row("megatron_fp8", error="DependencyError: a | b")
REPORT = Report(
    options=resolved(peers=["hf_eager", "megatron_fp8"], ours=["bf16"]),
    device_type="cuda",
    machine=MACHINE,
    versions={"torch": "2.11.0"},
    num_ranks=2,
    tokens_per_step=64,
    flops_per_token=1.0,
    ceilings=None,
    rows=with_ratios([PEER, FAILED, OURS]),
)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_ratios_are_to_the_peers_that_ran():
    assert [r.ratios for r in REPORT.rows] == [{"hf_eager": 1.0}, {}, {"hf_eager": 1.5}]


def test_markdown_has_a_line_for_each_contender_also_for_one_that_failed():
    lines = [cells(line) for line in report.to_markdown(REPORT).splitlines() if line.startswith("|")]
    assert lines[0][3:6] == ["tokens/s per GPU", "model TFLOP/s", "/ hf_eager"]
    by_name = {line[0]: line for line in lines[:5]}
    assert by_name["ours:bf16"] == [
        *("ours:bf16", "bf16", "500.0 (500.0 to 500.0)", "150", "3", "1.50", "2.5", "2.000 → 1.500", "1,234")
    ]
    assert by_name["megatron_fp8"][2] == "failed"
    assert len(by_name["megatron_fp8"]) == len(lines[0])


def test_differences_say_whom_they_favour_and_give_the_error():
    text = report.to_markdown(REPORT)
    lines = {cells(line)[0]: cells(line) for line in text.splitlines() if line.startswith("|")}  # of the last table
    assert lines["hf_eager"][1:5] == ["none", "no", "bf16", "the peer"]
    assert lines["ours:bf16"][1:5] == ["fp32", "yes", "fp32", "–"]
    assert lines["megatron_fp8"][-1] == r"error: DependencyError: a \| b"


def test_markdown_states_the_order_of_the_run_and_the_configuration():
    text = report.to_markdown(REPORT)
    assert "Order of the run: hf_eager, megatron_fp8, ours:bf16." in text
    assert "`--config-name L0_sanity`" in text
    assert text.startswith("## train-step on 2 × Some GPU")


def test_json_has_order_versions_config_and_rows(tmp_path: Path):
    report.write_json(REPORT, tmp_path / "x.json")
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["benchmark"] == "train-step"
    assert found["order"] == ["hf_eager", "megatron_fp8", "ours:bf16"]
    assert found["options"]["config"]["model"]["num_experts"] == 8
    assert found["options"]["seed"] == 0
    assert found["machine"]["gpu"] == "Some GPU"
    assert found["versions"] == {"torch": "2.11.0"}
    assert found["rows"][2]["ratios"] == {"hf_eager": 1.5}
    assert found["rows"][1]["error"] == "DependencyError: a | b"


@pytest.mark.parametrize("rows", [REPORT.rows, [FAILED]])
def test_chart_is_drawn_also_where_nothing_ran(rows: list[Row], tmp_path: Path):
    pytest.importorskip("matplotlib")
    report.write_chart(replace(REPORT, rows=rows), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_published_ratios_are_in_text_and_chart_and_no_part_of_the_rows(tmp_path: Path):
    published = resolved(peers=["hf_eager"], ours=["bf16"], published=[("elsewhere, 8 × B200", 2.21)])
    with_ratio = replace(REPORT, options=published)
    assert "Published elsewhere, as ratios to hf_eager there: elsewhere, 8 × B200 2.21." in report.to_markdown(
        with_ratio
    )
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    with mock.patch.object(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure)):
        report.write_chart(with_ratio, tmp_path / "x.png")
    above, below = drawn[0].axes
    assert [label.get_text() for label in above.get_yticklabels()] == ["ours:bf16", "hf_eager"]
    assert [label.get_text() for label in below.get_yticklabels()] == ["elsewhere, 8 × B200", "ours:bf16", "hf_eager"]
    widths = [bar.get_width() for bar in below.patches]  # pyright: ignore[reportAttributeAccessIssue]
    assert widths == [2.21, 1.5, 1.0]
