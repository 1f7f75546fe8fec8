"""A run whose saves fail goes on training, leaves the older steps as they are, and ends well once it can save."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import failed_save_jobs as jobs
from tests.distributed.failed_save_jobs import Seen
from tests.distributed.train_jobs import command
from tests.helpers.mounts import small_disk
from tests.helpers.pool import RankPool
from tests.helpers.tiny_runs import arguments, content, losses, metrics, step_numbers

EP2 = "parallel.ep=2"
# Four steps of this model, and nearly another one.
DISK_BYTES = 4_500_000


@pytest.fixture(scope="module")
def expected(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run without a fault."""
    folder = tmp_path_factory.mktemp("faultless")
    assert [one.code for one in ranks.run(command, 2, arguments(folder, EP2))] == [0, 0]
    return losses(folder / "run")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", num_bytes=DISK_BYTES) as mounted:
        yield mounted


def on(disk: Path, folder: Path, *changes: str) -> list[str]:
    return arguments(folder, EP2, f"checkpoint.ckpt_dir={disk}", *changes)


def steps_on(disk: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in disk.glob("step_*"))


def assert_untouched(seen: list[Seen]) -> None:
    """No checkpoint ever changed, none but the oldest went, and no failed save left anything, on any rank."""
    for one in seen:
        known: dict[int, str] = {}
        for steps in one.steps.values():
            assert all(known.setdefault(step, digest) == digest for step, digest in steps.items())
            assert not known or max(known) in steps
        assert not any(one.left_overs.values()), one.left_overs


def errors(seen: list[Seen]) -> str:
    """The standard error of rank 0."""
    assert seen[0].ended is not None
    return seen[0].ended.text


@pytest.mark.parametrize("how", ["nearly fill", pytest.param("fill", marks=pytest.mark.slow)])
def test_a_full_disk_costs_a_save_and_not_the_run(
    ranks: RankPool, tmp_path: Path, disk: Path, expected: dict[int, float], how: str
):
    seen = ranks.run(jobs.run_on_disk, 2, on(disk, tmp_path), disk, {6: how, 8: "empty"})
    assert [one.ended.code for one in seen] == [0, 0]
    assert losses(tmp_path / "run") == expected
    assert_untouched(seen)
    assert [sorted(seen[0].steps[step]) for step in (6, 7, 9, 10)] == [[3], [3], [3], [3, 9]]
    assert steps_on(disk) == [9, 12]
    text = errors(seen)
    assert text.count("IS NOT SAVED") == 1
    assert "STEP 6 IS NOT SAVED (1 in a row; more than checkpoint.max_failed_saves=3 end the run)" in text
    assert "step_00000006: not saved:" in text
    assert "[Errno 28] No space left on device" in text
    assert "step 9 is saved, after 1 that were not" in text
    stalls = {line["step"]: line["save_stall_ms"] for line in metrics(tmp_path / "run") if "save_stall_ms" in line}
    assert set(stalls) == {3, 6, 9, 12}
    assert all(0 < stall < 60_000 for stall in stalls.values())


def test_a_disk_that_is_full_for_all_that_the_run_writes_does_not_end_it(
    ranks: RankPool, tmp_path: Path, disk: Path, expected: dict[int, float]
):
    start = arguments(tmp_path, EP2, f"run.dir={disk}")
    seen = ranks.run(jobs.run_on_disk, 2, start, disk, {5: "fill", 8: "empty"})
    assert [one.ended.code for one in seen] == [0, 0]
    assert losses(disk / "run") == expected
    assert_untouched(seen)
    assert step_numbers(disk / "run") == [9, 12]
    assert json.loads((disk / "run/summary.json").read_text())["heldout_loss"] > 0


def test_a_folder_that_became_read_only_costs_a_save_and_not_the_run(
    ranks: RankPool, tmp_path: Path, disk: Path, expected: dict[int, float]
):
    seen = ranks.run(jobs.run_on_disk, 2, on(disk, tmp_path), disk, {6: "read-only", 8: "writable"})
    assert [one.ended.code for one in seen] == [0, 0]
    assert losses(tmp_path / "run") == expected
    assert_untouched(seen)
    assert steps_on(disk) == [9, 12]
    assert errors(seen).count("IS NOT SAVED") == 1
    assert "Read-only file system" in errors(seen)


@pytest.mark.parametrize(
    ("on_rank", "foreground"),
    [(1, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, False), (0, True), (1, True)))],
)
def test_a_failure_on_one_rank_is_heard_of_on_all(
    ranks: RankPool, tmp_path: Path, expected: dict[int, float], on_rank: int, foreground: bool
):
    start = arguments(tmp_path, EP2, f"checkpoint.async_save={'false' if foreground else 'true'}")
    seen = ranks.run(jobs.fail_on_one_rank, 2, start, on_rank=on_rank, step=6)
    assert [one.ended.code for one in seen] == [0, 0]
    assert losses(tmp_path / "run") == expected
    assert_untouched(seen)
    assert step_numbers(tmp_path / "run") == [9, 12]
    assert f"not saved: rank {on_rank}: OSError: [Errno 28] No space left on device." in errors(seen)


@pytest.mark.slow
def test_too_many_failures_end_every_rank_and_the_run_goes_on_when_there_is_room(
    ranks: RankPool, tmp_path: Path, disk: Path, expected: dict[int, float]
):
    start = on(disk, tmp_path, "checkpoint.max_failed_saves=1")
    seen = ranks.run(jobs.run_on_disk, 2, start, disk, {6: "nearly fill"})
    assert [one.ended.code for one in seen] == [2, 2]
    assert "CheckpointError" not in seen[1].ended.text
    error = seen[0].ended.text
    assert (
        "\nCheckpointError: checkpoint.max_failed_saves=1: 2 saves in a row failed or were left out. The last one: "
    ) in error
    assert "No space left on device" in error
    assert f"The newest complete step is step_00000003. Make {disk} writable and make room" in error
    assert list(losses(tmp_path / "run")) == list(range(1, 11))
    assert_untouched(seen)
    assert steps_on(disk) == [3]
    jobs.empty(disk)
    assert [one.code for one in ranks.run(command, 2, start)] == [0, 0]
    assert losses(tmp_path / "run") == expected
    assert steps_on(disk) == [9, 12]


@pytest.mark.slow
def test_the_last_save_is_repeated_when_the_disk_was_full_for_a_moment(
    ranks: RankPool, tmp_path: Path, disk: Path, expected: dict[int, float]
):
    seen = ranks.run(jobs.run_on_disk, 2, on(disk, tmp_path), disk, {12: "nearly fill", -1: "empty"})
    assert [one.ended.code for one in seen] == [0, 0]
    assert losses(tmp_path / "run") == expected
    assert_untouched(seen)
    assert steps_on(disk) == [9, 12]
    assert errors(seen).count("STEP 12 IS NOT SAVED") == 1


@pytest.mark.slow
def test_a_last_save_that_never_succeeds_is_an_error(ranks: RankPool, tmp_path: Path, disk: Path):
    seen = ranks.run(jobs.run_on_disk, 2, on(disk, tmp_path), disk, {12: "nearly fill"})
    assert [one.ended.code for one in seen] == [2, 2]
    assert "The last step, 12, must be saved, and 3 retries failed too" in seen[0].ended.text
    assert_untouched(seen)
    assert steps_on(disk) == [6, 9]
    before = content(disk)
    jobs.empty(disk)
    before.pop(jobs.BALLAST)
    assert content(disk) == before


@pytest.mark.slow
def test_saves_slower_than_their_interval_are_left_out(ranks: RankPool, tmp_path: Path, expected: dict[int, float]):
    seen = ranks.run(jobs.write_slowly, 2, arguments(tmp_path, EP2), slow=3, until=11)
    assert [one.ended.code for one in seen] == [0, 0]
    assert losses(tmp_path / "run") == expected
    assert step_numbers(tmp_path / "run") == [3, 12]
    text = errors(seen)
    assert "STEP 6 IS NOT SAVED (1 in a row" in text
    assert "STEP 9 IS NOT SAVED (2 in a row" in text
    assert text.count("left out: step 3 is still being written.") == 2
    stalls = {line["step"]: line["save_stall_ms"] for line in metrics(tmp_path / "run") if "save_stall_ms" in line}
    assert [step for step, stall in stalls.items() if stall is None] == [6, 9]


@pytest.mark.slow
def test_a_disk_that_is_too_slow_for_the_interval_ends_the_run_with_its_save_complete(
    ranks: RankPool, tmp_path: Path, expected: dict[int, float]
):
    start = arguments(tmp_path, EP2, "checkpoint.max_failed_saves=1")
    seen = ranks.run(jobs.write_slowly, 2, start, slow=3, until=99)
    assert [one.ended.code for one in seen] == [2, 2]
    error = seen[0].ended.text
    assert "2 saves in a row failed or were left out. The last one: left out: step 3 is still being" in error
    assert "The newest complete step is step_00000003." in error
    assert "raise checkpoint.every" in error
    assert step_numbers(tmp_path / "run") == [3]
    assert [one.code for one in ranks.run(command, 2, start)] == [0, 0]
    assert losses(tmp_path / "run") == expected
