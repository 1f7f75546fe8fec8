"""The documented training commands, run as a user runs them."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from moe_framework.checkpoint import read_manifest
from moe_framework.config.load import load_config
from moe_framework.config.validate import validate
from tests.helpers.commands import Command, python, started, torchrun
from tests.helpers.tiny_runs import ROOT, arguments, content, losses, metrics, step_numbers
from tests.unit.checkpoint.steps import rewrite_checksums
from tests.unit.checkpoint.test_safe_pickle import Touch, metadata, write

TIMEOUT_S = 240
METRICS = {
    "step",
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "mfu",
    "aux_loss",
    "z_loss",
    "max_over_mean_load",
    "peak_memory_bytes",
    "tokens",
}
BASELINES = {"uniform_loss", "markov1_loss", "markov3_loss", "markov_best_loss"}
RECORD = {"git_commit", "versions", "world_size", "layout", "device", "experts_backend", "config", "starts"}
SUMMARY = {"heldout_loss", *BASELINES, "tokens_per_second", "wall_s", "peak_rss_bytes"}


@pytest.fixture(scope="module")
def sanity(tmp_path_factory) -> tuple[Path, str]:
    """The run folder and the output of the documented command, cut to six steps."""
    folder = tmp_path_factory.mktemp("sanity")
    changes = [f"run.dir={folder}", "train.max_steps=6", "optim.warmup_steps=2", "checkpoint.every=3", "eval.every=4"]
    with started(torchrun(2, ["--config-name", "L0_sanity", *changes]), folder / "log") as command:
        assert command.wait(TIMEOUT_S) == 0, command.output
    return folder / "L0_sanity", command.output


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, Command]:
    """The folder of a tiny run of plain `python`."""
    folder = tmp_path_factory.mktemp("alone")
    with started(python(arguments(folder, "parallel.ep=1", max_steps=6)), folder / "log") as command:
        assert command.wait(TIMEOUT_S) == 0, command.output
    return folder, command


def test_sanity_leaves_the_documented_run_directory(sanity):
    run_dir, _ = sanity
    names = {"config.yaml", "run.json", "metrics.jsonl", "summary.json", "tensorboard", "checkpoints", ".lock"}
    assert {path.name for path in run_dir.iterdir()} == names
    steps = {"step_00000003", "step_00000006"}
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} == steps | {"latest", ".lock"}
    assert (run_dir / "checkpoints/latest").read_text() == "step_00000006\n"
    assert [path.stat().st_size > 0 for path in (run_dir / "tensorboard").iterdir()] == [True]
    record = json.loads((run_dir / "run.json").read_text())
    assert record.keys() == RECORD
    assert record["world_size"] == 2
    assert record["layout"]["ep"] == 2
    assert [(start["reason"], start["ended"]["code"]) for start in record["starts"]] == [("first start", 0)]


def test_sanity_learns_and_measures_every_step(sanity):
    lines = metrics(sanity[0])
    later = [line.keys() - METRICS for line in lines]
    assert later == [set(), set(), {"save_stall_ms"}, {"heldout_loss"}, set(), {"save_stall_ms"}]
    assert all(line.keys() >= METRICS for line in lines)
    assert lines[2]["save_stall_ms"] > 0
    assert list(losses(sanity[0])) == list(range(1, 7))
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(line["tokens"] == 16 * 256 for line in lines)
    assert [line["lr"] for line in lines[:2]] == pytest.approx([1.5e-3, 3e-3])


def test_sanity_summary_has_model_and_baselines(sanity):
    run_dir, output = sanity
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary.keys() == SUMMARY
    assert summary["uniform_loss"] == math.log(4)
    assert summary["markov_best_loss"] <= summary["markov3_loss"] < summary["markov1_loss"] < summary["uniform_loss"]
    # About 1.354 and 1.345 on this genome.
    assert summary["markov3_loss"] == pytest.approx(1.354, abs=3e-3)
    assert summary["markov_best_loss"] == pytest.approx(1.345, abs=3e-3)
    assert 1.3 < summary["heldout_loss"] < metrics(run_dir)[0]["loss"]
    assert summary["peak_rss_bytes"] < 3e9
    line = next(line for line in output.splitlines() if line.startswith("heldout_loss="))
    assert [part.split("=")[0] for part in line.split()] == list(summary)
    assert "step 4: held-out loss " in output


def test_sanity_config_gives_the_same_run_again(sanity):
    run_dir, _ = sanity
    saved = load_config("config", [], ROOT / "configs", run_dir)
    assert validate(saved, world_size=2, local_world_size=2) == saved
    assert (saved.parallel.dp, saved.parallel.ep, saved.train.max_steps) == (1, 2, 6)
    state = read_manifest(run_dir / "checkpoints/step_00000006").state
    assert state["position"] == {"step": 6, "consumed_samples": 96}
    assert state["layout"]["world_size"] == 2


def test_sanity_prints_its_choices_and_no_traceback(sanity):
    _, output = sanity
    assert "experts.backend: grouped_mm (" in output
    assert "dispatcher.backend: all_to_all (" in output
    assert "Traceback" not in output
    assert "step 1/6  loss " in output


def test_plain_python_trains_on_one_rank(alone):
    folder, command = alone
    assert list(losses(folder / "run")) == [1, 2, 3, 4, 5, 6]
    assert step_numbers(folder / "run") == [3, 6]
    assert "dispatcher.backend: local (" in command.output
    assert json.loads((folder / "run/summary.json").read_text()).keys() == SUMMARY


def test_crafted_checkpoint_given_to_resume_runs_nothing(alone, tmp_path):
    folder, _ = alone
    marker, step_dir = tmp_path / "ran", tmp_path / "step_00000006"
    step_dir.mkdir()
    for name, data in content(folder / "run/checkpoints/step_00000006").items():
        (step_dir / name).write_bytes(data)
    write(step_dir, metadata(planner_data=Touch(marker)))
    rewrite_checksums(step_dir)
    start = arguments(tmp_path, "parallel.ep=1", f"checkpoint.resume={step_dir}", max_steps=6)
    with started(python(start), tmp_path / "log") as command:
        assert command.wait(TIMEOUT_S) == 2
    assert f"CheckpointError: {step_dir}/.metadata: refused: it wants posix.system" in command.output
    assert not marker.exists()
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_dry_run_prints_configuration_and_sizes_without_torch(tmp_path):
    start = ["--config-name", "L0_sanity", "train.dry_run=true", "parallel.ep=1", f"run.dir={tmp_path}"]
    code = f"import sys, train_fsdp2_ep; code = train_fsdp2_ep.main({start}); sys.exit(code or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "  dry_run: true\n" in done.stdout
    assert "ranks: 1 (dp=1, ep=1, tp=1)\n" in done.stdout
    assert "a step: 16 rows, 4,096 tokens, 4 micro-steps" in done.stdout
    assert "estimate of a rank's memory" in done.stdout
    assert "estimate of a checkpoint: 0.0221 GB on disk" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_dry_run_for_another_machine_needs_no_ranks():
    other = ["hardware.target=cpu", "parallel.dp=4", "train.micro_batch_size=2"]
    start = ["--config-name", "L0_sanity", "train.dry_run=true", *other]
    done = subprocess.run(python(start), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ranks: 8 (dp=4, ep=2, tp=1)\n" in done.stdout
