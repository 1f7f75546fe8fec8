"""What the benchmark of saves prints and writes."""

import json
from pathlib import Path

import pytest

from moe_framework.config.schema import Config
from tools.benchmarks.machine import Machine
from tools.benchmarks.saves import BACKGROUND, FOREGROUND, Beats, Report, Save
from tools.benchmarks.saves_options import Options
from tools.benchmarks.saves_report import to_markdown, write_chart, write_json
from tools.benchmarks.timing import Spread


def spread(median: float) -> Spread:
    return Spread(median, 0.5 * median, 2 * median)


def report() -> Report:
    options = Options("L0_sanity", Config(), "cpu", 2, Path("/disk"), steps=5, warmup=1, repetitions=10, seed=0)
    machine = Machine("a CPU", 2, "AVX2", None, "2.11", 1, 0.1)
    background = Save(spread(0.02), spread(0.016), spread(0.9), 3.0, spread(0.3), spread(0.11), spread(0.08))
    foreground = Save(spread(0.5), spread(0.001), spread(0.5), 0.0, None, spread(0.5), spread(2.0))
    return Report(
        options,
        "cpu",
        machine,
        num_parameters=1_842_304,
        step_bytes=22_500_000,
        step=spread(0.25),
        saves={BACKGROUND: background, FOREGROUND: foreground},
        stall_ratio=spread(25.0),
        heartbeat=Beats(True, 50, 1.5e-5, 4e-4, 6e-5),
    )


def test_the_table_has_a_line_for_each_way_in_milliseconds():
    text = to_markdown(report())
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows[0][:4] == ["save", "stall ms", "of it staging ms", "stall, % of a step"]
    assert rows[2] == [
        "background",
        "20.0 (10.0 to 40.0)",
        "16.0 (8.0 to 32.0)",
        "8.0 (4.0 to 16.0)",
        "900.0 (450.0 to 1800.0)",
        "3",
        "300.0 (150.0 to 600.0)",
        "110.0 (55.0 to 220.0)",
    ]
    assert rows[3][0] == "foreground"
    assert rows[3][5:7] == ["0", ""]
    assert "1,842,304 parameters, 22.5 MB a saved step; 10 repetitions" in text
    assert "A training step without a save takes 250.0 (125.0 to 500.0) ms." in text
    assert "is 25.0 (12.5 to 50.0) times that in the background" in text
    assert "Heartbeat, with ft_launcher's monitor: 15.00 µs a step, 0.00600 % of it" in text


def test_json_has_the_fields_in_seconds(tmp_path: Path):
    write_json(report(), tmp_path / "x.json")
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["benchmark"] == "saves"
    assert found["saves"]["background"]["stall"] == {"median": 0.02, "lower_quartile": 0.01, "upper_quartile": 0.04}
    assert found["saves"]["foreground"]["step_meanwhile"] is None
    assert found["heartbeat"]["share_of_step"] == 6e-5
    assert found["options"]["folder"] == "/disk"


def test_chart_is_a_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    write_chart(report(), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
