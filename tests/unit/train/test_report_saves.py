"""What the reporter writes about saves and about those that failed."""

import logging
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_framework.config.schema import CheckpointConfig, Config, TrainConfig
from moe_framework.distributed.runtime import LaunchEnvironment, Runtime
from moe_framework.train.report import Reporter
from tests.unit.train.test_report import COUNTS, NO_GROUP, RESULT, lines


def reporter(directory: Path, *, rank: int = 0) -> Reporter:
    runtime = Runtime(LaunchEnvironment(rank=rank, world_size=2), torch.device("cpu"), NO_GROUP)
    config = Config(train=TrainConfig(max_steps=5), checkpoint=CheckpointConfig(every=2, max_failed_saves=3))
    own = Reporter(config, runtime, directory, first_step=0, mfu_per_token_rate=1e-3)
    own.start()
    return own


def record(own: Reporter, step: int) -> None:
    own.end_step(step, RESULT, COUNTS, 3e-4, range(4 * step, 4 * step + 4))


def points(directory: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_the_stall_is_in_the_line_of_the_step_that_saved(tmp_path):
    own = reporter(tmp_path)
    for step in (1, 2, 3, 4, 5):
        record(own, step)
        if step in (2, 5):
            own.saved(step, 0.0125 * step)
    own.close()
    found = {line["step"]: line["save_stall_ms"] for line in lines(tmp_path) if "save_stall_ms" in line}
    # Step 4 was due, and not saved.
    assert found == {2: 25.0, 4: None, 5: 62.5}
    assert points(tmp_path, "checkpoint/save_stall_ms") == [(2, 25.0), (5, 62.5)]


def test_a_stop_between_due_steps_saves_without_a_place_in_the_line(tmp_path):
    own = reporter(tmp_path)
    record(own, 3)
    own.saved(3, 0.5)
    own.close()
    assert "save_stall_ms" not in lines(tmp_path)[0]
    assert points(tmp_path, "checkpoint/save_stall_ms") == [(3, 500.0)]


def test_failures_are_said_loudly_and_counted(tmp_path, capsys, caplog):
    own = reporter(tmp_path)
    record(own, 4)
    own.save_failed(2, "step_00000002: not saved: No space left on device.", 1)
    own.save_failed(4, "left out", 2)
    own.close()
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [
        "STEP 2 IS NOT SAVED (1 in a row; more than checkpoint.max_failed_saves=3 end the run): "
        "step_00000002: not saved: No space left on device.",
        "STEP 4 IS NOT SAVED (2 in a row; more than checkpoint.max_failed_saves=3 end the run): left out",
    ]
    assert "step 4: not saved (2 in a row)\n" in capsys.readouterr().out
    assert points(tmp_path, "checkpoint/failed_saves") == [(2, 1.0), (4, 2.0)]


def test_other_ranks_are_silent(tmp_path, capsys, caplog: pytest.LogCaptureFixture):
    own = reporter(tmp_path, rank=1)
    own.saved(2, 0.1)
    own.save_failed(4, "left out", 1)
    own.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
    assert caplog.records == []
