"""The benchmark of saves tells a save in the background from one in the foreground, and leaves nothing behind."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_framework.checkpoint import save
from moe_framework.errors import ConfigError
from tests.helpers.pool import RankPool
from tests.helpers.tiny_runs import ROOT, SIZES
from tools.benchmarks import saves
from tools.benchmarks.saves import BACKGROUND, FOREGROUND, Report
from tools.benchmarks.saves_options import Options, resolve

WRITE_S = 0.5


def measure(folder: Path) -> Report:
    """Run the benchmark on a disk on which a write takes its time."""
    genuine = save._Writer.write_data

    def write_slowly(writer: Any, *args: Any) -> Any:
        time.sleep(WRITE_S)
        return genuine(writer, *args)

    config, num_ranks = resolve("L0_sanity", SIZES, (ROOT / "configs", None), 2, "cpu")
    options = Options("L0_sanity", config, "cpu", num_ranks, folder, steps=2, warmup=1, repetitions=2, seed=0)
    group = dist.group.WORLD
    assert group is not None
    with mock.patch.object(save._Writer, "write_data", write_slowly):
        return saves.measure_saves(group, torch.device("cpu"), options)


@pytest.mark.slow
def test_only_the_save_in_the_foreground_waits_for_the_disk(ranks: RankPool, tmp_path: Path):
    first, second = ranks.run(measure, 2, tmp_path)
    assert replace(first, machine=second.machine) == second
    background, foreground = first.saves[BACKGROUND], first.saves[FOREGROUND]
    assert foreground.stall.lower_quartile >= WRITE_S
    assert 0 < background.staging.median < background.stall.median < WRITE_S
    assert min(background.published.median, foreground.published.median) >= WRITE_S
    assert background.steps_meanwhile >= 1
    assert background.step_meanwhile is not None
    assert foreground.steps_meanwhile == 0
    assert foreground.step_meanwhile is None
    assert foreground.cost == foreground.stall
    assert background.cost.median >= background.stall.lower_quartile - background.published.upper_quartile
    assert first.stall_ratio.median > 1
    assert first.step.median > 0
    # A step has the weights and two moments in float32.
    assert first.step_bytes > 3 * 4 * first.num_parameters
    assert first.heartbeat.has_monitor is False
    assert first.heartbeat.calls == 2 * 2
    assert 0 < first.heartbeat.share_of_step < 0.1
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"parallel\.ep"):
        resolve("L0_sanity", ["parallel.ep=3"], (ROOT / "configs", None), 3, "cpu")
