"""Which rank failed first, in this start and not in one before it."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from moe_framework.distributed import failure as module
from moe_framework.distributed.failure import FirstFailure
from moe_framework.errors import CheckpointError, ConfigError, DataError, ExitCode, RankError


@pytest.fixture
def store() -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
    kind = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    return kind("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes of processes that were ended."""
    codes: list[int] = []
    monkeypatch.setattr(module.os, "_exit", codes.append)
    monkeypatch.setattr(module, "LEAVE_AFTER_S", 0.2)
    monkeypatch.setattr(module, "POLL_S", 0.05)
    return codes


def fail(own: FirstFailure, error: Exception) -> None:
    with pytest.raises(type(error)), own.telling():
        raise error


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_the_first_rank_prints_its_traceback_and_the_others_a_line(store, ended, capsys):
    first, second = FirstFailure(store, "a", 1), FirstFailure(store, "a", 0)
    assert not second.is_known()
    assert second.first() is None
    fail(first, ValueError("bad\nrow"))
    assert capsys.readouterr().err.startswith("rank 1 failed:\nTraceback (most recent call last):\n")
    assert second.is_known()
    fail(second, RuntimeError("connection closed"))
    assert capsys.readouterr().err == "rank 0: RuntimeError: connection closed [after rank 1: ValueError: bad]\n"
    assert second.first() == "rank 1: ValueError: bad"
    first.left()
    second.left()


def test_a_start_does_not_know_of_failures_of_the_one_before(store, ended, capsys):
    before, now = FirstFailure(store, "a", 1), FirstFailure(store, "b", 1)
    fail(before, ValueError("of the start before"))
    before.left()
    assert not now.is_known()
    assert now.first() is None
    capsys.readouterr()
    fail(now, KeyError("of this start"))
    now.left()
    assert capsys.readouterr().err.startswith("rank 1 failed:\nTraceback")


def test_an_error_that_every_rank_has_is_left_to_the_entry_point(store, ended, capsys):
    own = FirstFailure(store, "a", 0)
    fail(own, DataError("data ended"))
    assert not own.told
    assert not own.is_known()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "said"),
    [
        (DataError("data ended"), DataError("data ended"), True),
        (ConfigError(["a", "b"]), ConfigError(["a", "b"]), True),
        (DataError("data ended"), DataError("data ended at 5"), False),
        (DataError("damaged"), CheckpointError("damaged"), False),
    ],
)
def test_an_error_is_said_elsewhere_where_rank_0_has_the_same(store, ended, of_rank_0, of_rank_1, said: bool):
    one, other = FirstFailure(store, "a", 0), FirstFailure(store, "a", 1)
    # The first to fail waits for rank 0; none waits for another rank.
    waiting = threading.Thread(target=fail, args=(other, of_rank_1))
    waiting.start()
    time.sleep(0.1)
    fail(one, of_rank_0)
    waiting.join()
    assert of_rank_1.said_elsewhere is said
    assert not of_rank_0.said_elsewhere


def test_an_error_of_one_rank_is_not_said_elsewhere(store, ended, monkeypatch):
    monkeypatch.setattr(module, "SAME_ERROR_S", 0.1)
    fail(FirstFailure(store, "before", 0), DataError("data ended"))
    error = DataError("data ended")
    fail(FirstFailure(store, "a", 1), error)
    assert not error.said_elsewhere
    # Rank 0 failed of something else, which it says.
    first = FirstFailure(store, "b", 0)
    fail(first, ValueError("bad"))
    first.left()
    fail(FirstFailure(store, "b", 1), error)
    assert not error.said_elsewhere


def test_an_error_is_compared_once_on_its_way_through_several_blocks(store, ended, monkeypatch):
    monkeypatch.setattr(module, "SAME_ERROR_S", 0.3)
    own, started = FirstFailure(store, "a", 1), time.monotonic()
    with pytest.raises(DataError), own.telling(), own.telling(), own.telling():
        raise DataError("data ended")
    assert time.monotonic() - started < 0.6


def test_a_rank_that_hears_of_anothers_error_through_a_collective_is_not_the_first(store, ended, capsys):
    first, second = FirstFailure(store, "a", 1), FirstFailure(store, "a", 0)
    fail(first, ValueError("bad"))
    capsys.readouterr()
    fail(second, RankError("rank 1 failed: ValueError: bad"))
    assert capsys.readouterr().err.endswith("[after rank 1: ValueError: bad]\n")
    first.left()
    second.left()


def test_a_rank_that_cannot_leave_is_ended_and_one_that_has_left_is_not(store, ended, capsys):
    own = FirstFailure(store, "a", 0)
    fail(own, ValueError("bad"))
    assert until(lambda: ended == [ExitCode.FAILED])
    other = FirstFailure(store, "b", 0)
    fail(other, ValueError("bad"))
    other.left()
    time.sleep(0.4)
    assert ended == [ExitCode.FAILED]


def test_a_rank_that_waits_for_a_failed_one_is_ended_without_hearing_of_it(store, ended, capsys):
    failed, waiting = FirstFailure(store, "a", 1), FirstFailure(store, "a", 0)
    with waiting:
        time.sleep(0.3)
        assert ended == []
        fail(failed, ValueError("bad"))
        failed.left()
        assert until(lambda: ended == [ExitCode.FAILED])


def test_a_store_that_has_gone_counts_as_a_failure(ended, tmp_path: Path, capsys):
    def refuse(*_: object) -> None:
        raise RuntimeError("connection reset")

    own = FirstFailure(dist.FileStore(str(tmp_path / "store"), 1), "a", 0)  # pyright: ignore[reportPrivateImportUsage]
    own._store = SimpleNamespace(check=refuse, add=refuse, get=refuse)  # pyright: ignore[reportAttributeAccessIssue]
    assert own.is_known()
    assert own.first() is None
    fail(own, RuntimeError("connection closed"))
    own.left()
    assert "[after the rank that kept the store ended]" in capsys.readouterr().err
    error = DataError("data ended")
    other = FirstFailure(dist.FileStore(str(tmp_path / "other"), 1), "a", 1)  # pyright: ignore[reportPrivateImportUsage]
    other._store = own._store
    fail(other, error)
    assert not error.said_elsewhere
