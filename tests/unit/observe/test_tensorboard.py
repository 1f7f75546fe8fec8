import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_framework.observe.tensorboard import RETRY_S, TensorBoardWriter
from tests.helpers.mounts import small_disk


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_costs_points_and_not_the_run(tmp_path: Path, caplog):
    now = 0.0
    with small_disk(tmp_path / "disk", num_bytes=64 * 1024) as disk:
        writer = TensorBoardWriter(disk / "board", None, clock=lambda: now)
        writer.scalars(1, {"loss": 1.0})
        with contextlib.suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        many = {f"curve_{number}": 1.0 for number in range(100)}
        for step in (2, 3, 4):
            writer.scalars(step, many)
            now += 0.6 * RETRY_S
        assert caplog.text.count("TensorBoard misses points") == 1
        (disk / "ballast").unlink()
        now += RETRY_S
        writer.scalars(5, {"loss": 5.0})
        writer.close()
        assert curve(disk / "board", "loss") == [(1, 1.0), (5, 5.0)]
        # An attempt leaves an empty file: the one at step 3 was too early.
        assert len(list((disk / "board").iterdir())) == 3


def test_importing_the_module_does_not_import_tensorboard():
    code = "import sys, moe_framework.observe.tensorboard as m; sys.exit('tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
