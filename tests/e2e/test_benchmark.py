"""The documented benchmark command, with tiny sizes: it starts its own ranks, and its numbers are complete."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = {"tokens": 32, "hidden-size": 16, "intermediate-size": 16, "repetitions": 2, "warmup": 1, "threads": 1}


@pytest.mark.slow
def test_expert_block_runs_on_a_cpu_and_writes_its_numbers(tmp_path: Path):
    pytest.importorskip("matplotlib")
    options = TINY | {"json": tmp_path / "x.json", "chart": tmp_path / "x.png"}
    done = subprocess.run(
        [
            sys.executable,
            "tools/benchmark.py",
            "expert-block",
            "--device=cpu",
            *(f"--{k}={v}" for k, v in options.items()),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("## expert-block on cpu\n")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "x.json").read_text())
    assert set(found) == {"benchmark", "options", "device_type", "machine", "experts", "dispatch", "skipped"}
    assert found["machine"]["torch_version"].startswith("2.")
    assert found["skipped"] == []

    dtypes = ("fp32", "bf16")
    assert [(x["num_experts"], x["dtype"]) for x in found["experts"]] == [(e, d) for e in (8, 64) for d in dtypes]
    for result in found["experts"]:
        assert result["loop_over_grouped_mm"]["median"] > 0
        assert all(result["gflop_per_s"][name] > 0 for name in ("loop", "grouped_mm"))

    assert [(x["ep"], x["dtype"]) for x in found["dispatch"]] == [(ep, d) for ep in (2, 4) for d in dtypes]
    for result in found["dispatch"]:
        assert result["all_gather_over_all_to_all_bytes"] > 0
        assert result["all_gather_over_all_to_all_seconds"]["median"] > 0
        # Two choices per token, of positive terms: the two sums are the same numbers in another order.
        assert result["max_relative_difference"] == 0
