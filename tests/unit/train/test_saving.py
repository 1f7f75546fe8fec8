"""When a run saves, leaves a save out, tries again and gives up; with a store that fails as it is told."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_framework.checkpoint.save import SaveFailedError
from moe_framework.config.schema import CheckpointConfig, Config
from moe_framework.errors import CheckpointError, RankError
from moe_framework.train import saving
from moe_framework.train.persist import Position
from moe_framework.train.saving import RETRY_PAUSE_S, Saver

FULL = SaveFailedError("step_X: not saved: No space left on device.")
LOST = RankError("the save was cut short")


@dataclasses.dataclass
class Store:
    """A store in the background; a step is in `saving` until `end` says how it ended."""

    fail: list[Exception | None] = dataclasses.field(default_factory=list)
    saved: list[int] = dataclasses.field(default_factory=list)
    begun: list[int] = dataclasses.field(default_factory=list)
    in_flight: int | None = None
    done: bool = False
    looks: int = 0

    def save(self, step: int) -> None:
        assert self.in_flight is None, "at most one in flight"
        self.begun.append(step)
        self.in_flight, self.done = step, False

    @property
    def is_writing(self) -> bool:
        """Waited for, it is written by the third look."""
        self.looks += 1
        return self.in_flight is not None and not self.done and self.looks % 3 != 0

    def wait(self) -> None:
        step, self.in_flight = self.in_flight, None
        if step is not None:
            error = self.fail.pop(0) if self.fail else None
            if error is not None:
                raise error
            self.saved.append(step)

    def poll(self) -> bool:
        if self.in_flight is not None and not self.done:
            return False
        self.wait()
        return True

    def latest_step(self) -> Path | None:
        self.wait()
        return Path(f"step_{self.saved[-1]:08d}") if self.saved else None


@dataclasses.dataclass
class Reporter:
    saves: list[int] = dataclasses.field(default_factory=list)
    failures: list[tuple[int, str, int]] = dataclasses.field(default_factory=list)

    def saved(self, step: int, stall_s: float) -> None:
        assert stall_s >= 0
        self.saves.append(step)

    def save_failed(self, step: int, reason: str, num_in_a_row: int) -> None:
        self.failures.append((step, reason, num_in_a_row))


@dataclasses.dataclass
class Lifeline:
    notes: list[str] = dataclasses.field(default_factory=list)

    def note(self, activity: str) -> None:
        self.notes.append(activity)


@dataclasses.dataclass
class Scene:
    store: Store
    reporter: Reporter
    saver: Saver
    pauses: list[float]
    lifeline: Lifeline

    def end_save(self) -> None:
        """Let the save in the background come to its end."""
        self.store.done = True

    def failed(self) -> list[tuple[int, int]]:
        return [(step, number) for step, _, number in self.reporter.failures]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    monkeypatch.setattr(
        saving.time, "sleep", lambda seconds: pauses.append(seconds) if seconds >= RETRY_PAUSE_S else None
    )
    monkeypatch.setattr(saving, "save", lambda training, position: training.store.save(position.step))

    def make(limit: int, *fail: Exception | None) -> Scene:
        store, reporter, lifeline = Store(list(fail)), Reporter(), Lifeline()
        config = Config(checkpoint=CheckpointConfig(ckpt_dir="/ckpt", max_failed_saves=limit))
        training: Any = SimpleNamespace(config=config, store=store, runtime=SimpleNamespace(is_main=True))
        saver = Saver(training, reporter, lifeline)  # pyright: ignore[reportArgumentType]
        return Scene(store, reporter, saver, pauses, lifeline)

    return make


def test_a_save_that_is_waited_for_is_no_silence(scene):
    own = scene(1)
    own.saver.save_and_wait(at(3))
    assert own.lifeline.notes
    assert set(own.lifeline.notes) == {"save"}


def at(step: int) -> Position:
    return Position(step, 4 * step)


def test_a_save_is_begun_and_heard_of_when_it_ends(scene):
    own = scene(3)
    assert own.saver.save(at(3)) is True
    own.saver.poll()
    assert own.store.saved == []
    own.end_save()
    own.saver.poll()
    assert (own.store.saved, own.reporter.saves, own.reporter.failures) == ([3], [3], [])


def test_a_failed_save_is_told_once_and_the_next_one_tries_again(scene, caplog):
    own = scene(3, FULL)
    own.saver.save(at(3))
    own.end_save()
    own.saver.poll()
    own.saver.poll()
    assert own.reporter.failures == [(3, str(FULL), 1)]
    assert own.saver.save(at(6)) is True
    own.end_save()
    own.saver.poll()
    assert own.store.saved == [6]
    assert own.saver.num_failed == 0
    assert "step 6 is saved, after 1 that were not" in caplog.text


def test_a_success_starts_the_count_again(scene):
    own = scene(1, FULL, None, FULL, None)
    for step in (1, 2, 3, 4):
        own.saver.save(at(step))
        own.end_save()
        own.saver.poll()
    assert own.failed() == [(1, 1), (3, 1)]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_more_than_the_limit_in_a_row_end_the_run_with_what_to_do(scene, limit):
    own = scene(limit, None, *[FULL] * 9)
    own.saver.save(at(10))
    own.end_save()
    for step in range(11, 11 + limit):
        own.saver.save(at(step))
        own.end_save()
    own.saver.save(at(20))
    own.end_save()
    with pytest.raises(CheckpointError) as caught:
        own.saver.poll()
    assert not isinstance(caught.value, SaveFailedError)
    assert str(caught.value) == (
        f"checkpoint.max_failed_saves={limit}: {limit + 1} saves in a row failed or were left out. "
        f"The last one: {FULL} "
        "The newest complete step is step_00000010. Make /ckpt writable and make room there, then start again: the run "
        "goes on from that step. Where saves are slow rather than failing, raise checkpoint.every."
    )
    assert len(own.reporter.failures) == limit + 1


def test_a_save_is_left_out_while_the_one_before_is_written(scene):
    own = scene(3)
    own.saver.save(at(3))
    assert own.saver.save(at(6)) is False
    assert own.saver.save(at(9)) is False
    assert own.reporter.failures == [
        (6, "left out: step 3 is still being written.", 1),
        (9, "left out: step 3 is still being written.", 2),
    ]
    own.end_save()
    assert own.saver.save(at(12)) is True
    assert (own.store.begun, own.store.saved, own.saver.num_failed) == ([3, 12], [3], 0)


def test_too_many_left_out_end_the_run_once_the_slow_one_is_complete(scene):
    own = scene(1)
    own.saver.save(at(3))
    own.saver.save(at(6))
    with pytest.raises(
        CheckpointError, match=r"=1: 2 saves.* left out: step 3 is still .*complete step is step_00000003"
    ):
        own.saver.save(at(9))


def test_the_limit_holds_across_failures_and_left_out_saves(scene):
    own = scene(1, FULL)
    own.saver.save(at(3))
    own.saver.save(at(6))
    own.end_save()
    with pytest.raises(CheckpointError, match=r"=1: 2 saves in a row.*No space left.*complete step is none\."):
        own.saver.poll()
    assert own.failed() == [(6, 1), (3, 2)]


def test_a_lost_rank_is_no_failed_save(scene):
    for call in ("poll", "save", "save_and_wait"):
        own = scene(3, LOST)
        own.saver.save(at(3))
        own.end_save()
        with pytest.raises(RankError, match="cut short"):
            own.saver.poll() if call == "poll" else getattr(own.saver, call)(at(6))
        assert own.reporter.failures == []


def test_the_last_save_waits_for_the_one_before_and_for_itself(scene):
    own = scene(3)
    own.saver.save(at(9))
    own.saver.save_and_wait(at(12))
    assert own.store.saved == [9, 12]
    assert own.reporter.saves == [9, 12]
    assert own.pauses == []


def test_the_last_step_is_not_saved_twice(scene):
    own = scene(3)
    own.saver.save(at(9))
    own.saver.save_and_wait(at(9))
    assert own.store.begun == [9]
    own = scene(3, FULL)
    own.saver.save(at(9))
    own.saver.save_and_wait(at(9))
    assert (own.store.begun, own.store.saved) == ([9, 9], [9])


def test_the_last_save_is_tried_again_after_growing_pauses(scene):
    own = scene(3, FULL, FULL, FULL)
    own.saver.save_and_wait(at(12))
    assert own.store.saved == [12]
    assert own.pauses == [2.0, 4.0, 8.0]
    assert own.failed() == [(12, 1), (12, 2), (12, 3)]


@pytest.mark.parametrize("limit", [0, 2])
def test_a_last_save_that_goes_on_failing_ends_the_run_with_an_error(scene, limit):
    own = scene(limit, None, *[FULL] * 9)
    own.saver.save(at(9))
    with pytest.raises(
        CheckpointError, match=rf"The last step, 12, must be saved, and {limit} retries .*step_00000009\."
    ):
        own.saver.save_and_wait(at(12))
    assert len(own.pauses) == limit


def test_the_last_save_has_its_tries_also_after_failures_before(scene):
    own = scene(1, FULL, FULL)
    own.saver.save(at(6))
    own.end_save()
    own.saver.poll()
    own.saver.save(at(9))
    own.saver.save_and_wait(at(12))
    assert own.store.saved == [12]


def test_newest_waits_and_says_what_cannot_be_read(scene, monkeypatch):
    own = scene(3, FULL)
    own.saver.save(at(3))
    assert own.saver.newest() == "none"
    assert own.failed() == [(3, 1)]

    def unreadable() -> None:
        raise CheckpointError("manifest damaged")

    monkeypatch.setattr(own.store, "latest_step", unreadable)
    assert own.saver.newest() == "unknown (manifest damaged)"
