"""A run that is told to stop saves, says so with its exit code, and goes on later as if it had not stopped."""

import json
import signal
from pathlib import Path

import pytest

from moe_framework.errors import ExitCode
from tests.distributed import train_jobs as jobs
from tests.helpers.pool import RankPool
from tests.helpers.tiny_runs import arguments, losses, metrics, step_numbers

EP2 = "parallel.ep=2"


def starts(folder: Path) -> list[dict]:
    return json.loads((folder / "run/run.json").read_text())["starts"]


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    ended = ranks.run(jobs.command, 2, arguments(folder, EP2))
    assert [one.code for one in ended] == [0, 0]
    return folder / "run"


@pytest.mark.parametrize(
    ("number", "on_rank"),
    [
        (signal.SIGTERM, 0),
        (signal.SIGUSR1, 1),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 0, marks=pytest.mark.slow),
    ],
)
def test_a_signal_on_one_rank_saves_and_stops_all_and_the_run_goes_on(
    ranks: RankPool, tmp_path: Path, whole: Path, number: signal.Signals, on_rank: int
):
    start = arguments(tmp_path, EP2)
    stopped = ranks.run(jobs.signalled, 2, start, number=number, on_rank=on_rank, in_step=5)
    assert [one.ended.code for one in stopped] == [ExitCode.STOPPED] * 2
    # The step in which it came is finished and saved, and is not one of checkpoint.every.
    assert step_numbers(tmp_path / "run") == [3, 5]
    assert starts(tmp_path)[-1]["ended"]["code"] == ExitCode.STOPPED
    resumed = ranks.run(jobs.watch, 2, start)
    assert resumed[0].start == (5, 20)
    assert starts(tmp_path)[-1]["reason"] == "stopped on request after step 5"
    assert [(line["loss"], line["grad_norm"]) for line in metrics(tmp_path / "run")] == [
        (line["loss"], line["grad_norm"]) for line in metrics(whole)
    ]


def test_a_step_that_is_saved_already_is_not_saved_again(ranks: RankPool, tmp_path: Path):
    ranks.run(jobs.signalled, 2, arguments(tmp_path, EP2), number=signal.SIGUSR1, on_rank=1, in_step=6)
    assert step_numbers(tmp_path / "run") == [3, 6]
    assert [line.get("save_stall_ms") is not None for line in metrics(tmp_path / "run")][3:] == [False, False, True]


def test_a_signal_in_the_last_step_changes_nothing(ranks: RankPool, tmp_path: Path, whole: Path):
    ended = ranks.run(jobs.signalled, 2, arguments(tmp_path, EP2), number=signal.SIGTERM, on_rank=1, in_step=12)
    assert [one.ended.code for one in ended] == [0, 0]
    assert losses(tmp_path / "run") == losses(whole)
    assert (tmp_path / "run/summary.json").exists()


def test_for_a_launcher_the_code_is_in_its_file_and_the_ranks_end_with_0(ranks: RankPool, tmp_path: Path):
    exit_file = tmp_path / "exit_code"
    ended = ranks.run(
        jobs.signalled_under_launcher,
        2,
        arguments(tmp_path, EP2),
        exit_file,
        number=signal.SIGUSR1,
        on_rank=0,
        in_step=2,
    )
    assert [one.ended.code for one in ended] == [0, 0]
    assert exit_file.read_text().strip() == str(int(ExitCode.STOPPED))
