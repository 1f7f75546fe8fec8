"""The documented train-step and collectives commands, with tiny sizes: they start their ranks and write their files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIZES = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.intermediate_size=16",
    "data.seq_length=16",
    "train.micro_batch_size=2",
)


def benchmark(*arguments: str) -> str:
    command = [sys.executable, "tools/benchmark.py", *arguments, "--device=cpu", "--repetitions=2", "--warmup=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_train_step_starts_two_ranks_and_writes_its_files(tmp_path: Path):
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"x.{name}" for name in ("json", "png", "md")}
    out = benchmark(
        *("train-step", "--config-name=L0_sanity", *SIZES, "--nproc=2", "--breakdown"),
        *("--peers", "hf_grouped_mm", "megatron_fp8", "--ours", "fp32"),
        *(f"--json={files['json']}", f"--chart={files['png']}", f"--markdown={files['md']}"),
    )
    assert out.startswith("## train-step on 2 × CPU rank\n")
    assert files["md"].read_text() == out
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    found = json.loads(files["json"].read_text())
    assert found["order"] == ["hf_grouped_mm", "megatron_fp8", "ours:fp32"]
    rows = {row["name"]: row for row in found["rows"]}
    assert "does not run on a CPU" in rows["megatron_fp8"]["error"]
    assert rows["ours:fp32"]["ratios"].keys() == {"hf_grouped_mm"}
    assert rows["ours:fp32"]["breakdown"]["step_seconds"] > 0
    assert found["ceilings"]["exchange_bytes"] > 0


@pytest.mark.slow
def test_collectives_start_two_ranks_and_write_their_files(tmp_path: Path):
    pytest.importorskip("matplotlib")
    files = [f"--json={tmp_path / 'x.json'}", f"--chart={tmp_path / 'x.png'}"]
    out = benchmark("collectives", "--nproc=2", "--tokens=16", *files)
    assert out.startswith("## collectives over 2 ranks, gloo\n")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "x.json").read_text())["results"]) == 6
