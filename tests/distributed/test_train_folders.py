"""The folders of a run: one run at a time has them, and what is damaged in them but not needed does not stop it."""

from pathlib import Path
from unittest import mock

from moe_framework.train import lock
from moe_framework.train.lock import locked
from tests.distributed import train_jobs as jobs
from tests.helpers.pool import RankPool
from tests.helpers.tiny_runs import arguments, content, losses, step_numbers

EP2 = "parallel.ep=2"


def command_without_wait(start: list[str]) -> jobs.Ended:
    """Run the entry point, which does not wait for a folder in use."""
    with mock.patch.object(lock, "WAIT_S", 0.0):
        return jobs.command(start)


def test_a_folder_in_use_is_refused_on_every_rank_before_anything_is_changed(ranks: RankPool, tmp_path: Path):
    ranks.run(jobs.command, 2, arguments(tmp_path, EP2, max_steps=3))
    # What the run that has the folder is writing, and what a run that may write there would remove or put back.
    (tmp_path / "run/checkpoints/step_00000006").mkdir()
    (tmp_path / "run/checkpoints/step_00000006/__0_0.distcp").write_text("half")
    (tmp_path / "run/checkpoints/step_00000003").rename(tmp_path / "run/checkpoints/step_00000003.replaced")
    with locked("run.dir=runs", tmp_path / "run/checkpoints"):
        before = content(tmp_path)
        ended = ranks.run(command_without_wait, 2, arguments(tmp_path, EP2, max_steps=6))
        assert content(tmp_path) == before
    assert [one.code for one in ended] == [2, 2]
    assert f"ConfigError: run.dir={tmp_path}: {tmp_path}/run/checkpoints is in use by process " in ended[0].text
    ended = ranks.run(command_without_wait, 2, arguments(tmp_path, EP2, max_steps=6))
    assert [one.code for one in ended] == [0, 0]
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    assert step_numbers(tmp_path / "run") == [3, 6]


def test_a_run_goes_on_from_a_sound_step_with_a_damaged_metrics_file(ranks: RankPool, tmp_path: Path):
    ranks.run(jobs.command, 2, arguments(tmp_path, EP2, max_steps=6))
    path = tmp_path / "run/metrics.jsonl"
    damaged = "half a li\n" + path.read_text()
    path.write_text(damaged)
    ended = ranks.run(jobs.command, 2, arguments(tmp_path, EP2, max_steps=7))
    assert [one.code for one in ended] == [0, 0]
    assert f"{path}: line 1 is not a JSON object" in ended[0].text
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6, 7]
    assert (tmp_path / "run/metrics.damaged.1.jsonl").read_text() == damaged
