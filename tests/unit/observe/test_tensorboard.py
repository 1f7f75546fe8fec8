import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_framework.observe.tensorboard import TensorBoardWriter


def curve(directory: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_points_are_one_curve_per_name(tmp_path: Path):
    writer = TensorBoardWriter(tmp_path, None)
    writer.scalars(1, {"train/loss": 2.0, "train/lr": 0.5})
    writer.scalars(2, {"train/loss": 1.0})
    writer.close()
    assert curve(tmp_path, "train/loss") == [(1, 2.0), (2, 1.0)]
    assert curve(tmp_path, "train/lr") == [(1, 0.5)]


def test_a_killed_process_loses_no_written_point(tmp_path: Path):
    code = (
        "import os, sys; from moe_framework.observe.tensorboard import TensorBoardWriter\n"
        "writer = TensorBoardWriter(sys.argv[1], None)\n"
        "writer.scalars(1, {'first': 1.0})\n"
        "writer.scalars(2, {f'c{i}': 1.0 for i in range(500)})\n"
        "os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert curve(tmp_path, "c499") == [(2, 1.0)]


def test_a_resumed_run_hides_the_steps_that_it_repeats(tmp_path: Path):
    first = TensorBoardWriter(tmp_path, None)
    for step in (1, 2, 3):
        first.scalars(step, {"loss": float(step)})
    first.close()
    # TensorBoard orders event files by the second in their names.
    (written,) = tmp_path.iterdir()
    written.rename(tmp_path / "events.out.tfevents.0000000001.host.1.0")
    resumed = TensorBoardWriter(tmp_path, purge_step=3)
    resumed.scalars(3, {"loss": 30.0})
    resumed.close()
    assert curve(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (3, pytest.approx(30.0))]


def test_importing_the_module_does_not_import_tensorboard():
    code = "import sys, moe_framework.observe.tensorboard as m; sys.exit('tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
