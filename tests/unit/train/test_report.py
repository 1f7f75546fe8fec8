import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_framework.config.schema import Config, EvalConfig, TrainConfig
from moe_framework.distributed.runtime import LaunchEnvironment, Runtime
from moe_framework.observe.throughput import StepTimer
from moe_framework.train.report import Reporter
from moe_framework.train.step import StepCounts, StepResult

COUNTS = StepCounts(num_targets=90, num_tokens=100)
RESULT = StepResult(
    loss=1.25,
    aux_loss=1.5,
    z_loss=4.0,
    grad_norm=0.5,
    applied=True,
    tokens_per_expert_LE=torch.tensor([[150, 50], [100, 100]]),
    entropy_L=torch.tensor([60.0, 50.0]),
)
NO_GROUP: Any = None


def reporter(directory: Path, *, rank: int = 0, first_step: int = 0, evaluate_every: int = 0) -> Reporter:
    runtime = Runtime(LaunchEnvironment(rank=rank, world_size=2), torch.device("cpu"), NO_GROUP)
    config = Config(train=TrainConfig(max_steps=10, log_every=2), eval=EvalConfig(every=evaluate_every))
    own = Reporter(config, runtime, directory, first_step=first_step, mfu_per_token_rate=1e-3)
    own.start()
    return own


def lines(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def record(own: Reporter, step: int, result: StepResult = RESULT) -> None:
    own.end_step(step, result, COUNTS, 3e-4, range(8 * step, 8 * step + 8))


def test_a_line_says_what_the_step_did(tmp_path):
    own = reporter(tmp_path)
    record(own, 1)
    record(own, 2, replace_result(loss=float("nan"), applied=False))
    own.close()
    first, second = lines(tmp_path)
    rate = first["tokens_per_second"]
    assert rate > 0
    assert first == {
        "step": 1,
        "loss": 1.25,
        "lr": 3e-4,
        "grad_norm": 0.5,
        "tokens_per_second": rate,
        "mfu": rate * 1e-3,
        "aux_loss": 1.5,
        "z_loss": 4.0,
        "max_over_mean_load": 1.5,
        "peak_memory_bytes": first["peak_memory_bytes"],
        "tokens": 100,
    }
    assert second["skipped"] is True
    assert second["loss"] is None
    assert second.keys() - first.keys() == {"skipped", "samples"}
    assert second["samples"] == [16, 23]


def test_a_loss_that_stands_out_is_told_with_its_batch(tmp_path, capsys):
    own = reporter(tmp_path)
    for step in range(1, 31):
        record(own, step, replace_result(loss=2.0 + 0.1 * (step % 2)))
    record(own, 31, replace_result(loss=9.0))
    own.close()
    last = lines(tmp_path)[-1]
    assert last["samples"] == [248, 255]
    assert last["loss_spike_sigmas"] > 100
    assert not any("loss_spike_sigmas" in line for line in lines(tmp_path)[:-1])
    height = f"{last['loss_spike_sigmas']:.1f}"
    assert f"step 31, samples 248 to 255: loss 9.0000 is {height} standard deviations" in capsys.readouterr().out


def replace_result(**changes: Any) -> StepResult:
    return RESULT._replace(**changes)


def test_summary_has_the_rate_of_all_steps_and_the_given_figures(tmp_path, capsys):
    own = reporter(tmp_path)
    for step in (1, 2, 3):
        record(own, step)
    own.summarise({"heldout_loss": 1.3, "peak_rss_bytes": 123456})
    own.close()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == ["heldout_loss", "peak_rss_bytes", "tokens_per_second", "wall_s"]
    rates = [line["tokens_per_second"] for line in lines(tmp_path)]
    assert summary["tokens_per_second"] == pytest.approx(3 / sum(1 / rate for rate in rates))
    assert 0 < summary["wall_s"] < 60
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith("heldout_loss=1.3000  peak_rss_bytes=123,456  tokens_per_second=")


def test_pauses_are_in_no_step_and_what_comes_before_them_is_in_the_summary(tmp_path):
    own = reporter(tmp_path)
    now = iter([0.0, 2.0, 3.0, 50.0, 54.0, 55.0, 90.0])
    own._timer = StepTimer(lambda: next(now))
    own.start()
    record(own, 1)
    with own.paused():
        pass
    record(own, 2)
    with own.paused():
        pass
    own.summarise({})
    own.close()
    assert [line["tokens_per_second"] for line in lines(tmp_path)] == [100 / 2.0, 100 / 5.0]
    assert json.loads((tmp_path / "summary.json").read_text())["tokens_per_second"] == 200 / 8.0


def test_a_heldout_loss_is_in_the_line_of_its_step(tmp_path):
    own = reporter(tmp_path, evaluate_every=3)
    for step in range(1, 10):
        record(own, step)
        if step in (3, 9):
            own.heldout(step, 1.0 + step / 100)
    own.close()
    # Step 6 was cut off before its evaluation.
    assert {line["step"]: line["heldout_loss"] for line in lines(tmp_path) if "heldout_loss" in line} == {
        3: 1.03,
        6: None,
        9: 1.09,
    }


def test_a_heldout_loss_and_a_stall_share_the_line(tmp_path):
    own = reporter(tmp_path, evaluate_every=10)
    own._max_steps, own._checkpoint = 99, replace(own._checkpoint, every=10)
    record(own, 10)
    own.heldout(10, 1.5)
    own.saved(10, 0.25)
    own.close()
    (line,) = lines(tmp_path)
    assert (line["heldout_loss"], line["save_stall_ms"]) == (1.5, 250.0)


def test_tensorboard_hides_the_curves_of_a_run_that_started_again_from_step_0(tmp_path):
    for last in (8, 4):
        own = reporter(tmp_path)
        for step in range(1, last + 1):
            record(own, step)
        own.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4]


def test_a_run_without_steps_has_no_rate(tmp_path):
    own = reporter(tmp_path, first_step=10)
    own.summarise({})
    own.close()
    assert json.loads((tmp_path / "summary.json").read_text())["tokens_per_second"] is None


def test_a_skipped_step_is_told(tmp_path, capsys):
    own = reporter(tmp_path)
    record(own, 1, replace_result(applied=False, grad_norm=float("inf")))
    own.heldout(1, 1.4)
    own.close()
    printed = capsys.readouterr().out
    assert "step 1, samples 8 to 15: loss=1.25, grad_norm=inf: not finite; the update was skipped" in printed
    assert "step 1: held-out loss 1.4000" in printed


def test_only_rank_0_writes(tmp_path, capsys):
    own = reporter(tmp_path, rank=1)
    record(own, 1)
    own.heldout(1, 1.4)
    own.saved(1, 0.1)
    own.summarise({"heldout_loss": 1.4})
    own.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_resumed_run_drops_the_lines_that_it_repeats(tmp_path):
    own = reporter(tmp_path)
    for step in (1, 2, 3, 4):
        record(own, step)
    own.close()
    own = reporter(tmp_path, first_step=2)
    record(own, 3, replace_result(loss=9.0))
    own.close()
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1.25), (2, 1.25), (3, 9.0)]


def test_a_run_that_starts_again_keeps_the_metrics_of_the_one_before(tmp_path):
    for loss in (1.0, 2.0, 3.0):
        own = reporter(tmp_path)
        record(own, 1, replace_result(loss=loss))
        own.close()
    assert [line["loss"] for line in lines(tmp_path)] == [3.0]
    kept = [json.loads((tmp_path / f"metrics.{number}.jsonl").read_text())["loss"] for number in (1, 2)]
    assert kept == [1.0, 2.0]


def test_a_start_without_steps_keeps_the_timing_of_the_run(tmp_path):
    first = reporter(tmp_path)
    record(first, 1)
    first.summarise({"heldout_loss": 1.0})
    first.close()
    before = json.loads((tmp_path / "summary.json").read_text())
    again = reporter(tmp_path, first_step=1)
    again.summarise({"heldout_loss": 1.5})
    again.close()
    after = json.loads((tmp_path / "summary.json").read_text())
    assert before["tokens_per_second"] > 0
    assert after == before | {"heldout_loss": 1.5}
