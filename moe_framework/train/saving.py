"""Saves of a run that go on failing for a while without ending it: when to save, to leave out, to retry, to stop."""

import logging
import time

from moe_framework.checkpoint.save import SaveFailedError
from moe_framework.errors import CheckpointError
from moe_framework.resilience.lifeline import Lifeline
from moe_framework.train.build import Training, checkpoint_dir
from moe_framework.train.persist import Position, save
from moe_framework.train.report import Reporter

logger = logging.getLogger(__name__)

# Before a retry of the last save; doubled each time. Slurm gives a job that it stops about a minute.
RETRY_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.02, 1.0


class Saver:
    """Saves a run, and counts the saves in a row that failed or were left out.

    What a save ended with is the same on every rank, so that every rank decides alike. The death of a rank is no
    failed save: it raises RankError at once.

    Args:
        training: The run; `checkpoint.max_failed_saves` says how much it bears.
        reporter: Hears of every save and of every failure.
        lifeline: Hears, while a save is waited for, that it is still being written.

    Attributes:
        num_failed: Saves in a row that failed or were left out.
    """

    def __init__(self, training: Training, reporter: Reporter, lifeline: Lifeline):
        self.num_failed = 0
        self._training = training
        self._reporter = reporter
        self._lifeline = lifeline
        self._limit = training.config.checkpoint.max_failed_saves
        self._begun: int | None = None  # the step whose save has not been seen to end
        self._saved: int | None = None  # the last step whose save was
        self._last_reason = ""

    def poll(self) -> None:
        """Hear, without waiting, whether a save in the background has ended; cheap enough for every step.

        Raises:
            CheckpointError: Too many saves in a row failed; on every rank.
            RankError: A rank ended or does not answer.

        Collective: the world; every rank must call.
        """
        try:
            idle = self._training.store.poll()
        except SaveFailedError as error:
            self._note_failure(self._take_begun(), str(error))
            self._stop_after_too_many()
        else:
            if idle:
                self._note_success()

    def save(self, position: Position) -> bool:
        """Save; if the save before is still being written, leave this one out instead of waiting for a slow disk.

        Args:
            position: Where the run is.

        Returns:
            Whether the save was begun and has not failed yet; the same on every rank.

        Raises:
            CheckpointError: Too many saves in a row failed; on every rank.
            RankError: A rank ended or does not answer.

        Collective: the world; every rank must call.
        """
        self.poll()
        if self._begun is not None:
            self._note_failure(position.step, f"left out: step {self._begun} is still being written.")
        elif self._try_to_save(position, wait=False):
            return True
        self._stop_after_too_many()
        return False

    def save_and_wait(self, position: Position) -> None:
        """Save, and return once the step is published; a save that fails is tried again after a pause.

        Args:
            position: Where the run ends.

        Raises:
            CheckpointError: `checkpoint.max_failed_saves` retries failed too; on every rank.
            RankError: A rank ended or does not answer.

        Collective: the world; every rank must call.
        """
        self._wait()
        if self._saved == position.step:
            return
        for retry in range(self._limit + 1):
            if retry:
                self._lifeline.note("pause before a save is tried again")
                time.sleep(min(RETRY_PAUSE_S * 2 ** (retry - 1), LONGEST_PAUSE_S))
            if self._try_to_save(position, wait=True):
                return
        raise self._too_many(f"The last step, {position.step}, must be saved, and {self._limit} retries failed too")

    def newest(self) -> str:
        """Name of the newest complete step, for an error that ends the run: waits for a save in the background.

        Raises:
            RankError: A rank ended or does not answer.

        Collective: the world; every rank must call.
        """
        self._wait()
        try:
            newest = self._training.store.latest_step()
        except CheckpointError as error:
            return f"unknown ({error})"
        return "none" if newest is None else newest.name

    def _try_to_save(self, position: Position, *, wait: bool) -> bool:
        started = time.perf_counter()
        try:
            save(self._training, position)
            if wait:
                self._wait_for_store()
        except SaveFailedError as error:
            self._note_failure(position.step, str(error))
            return False
        self._reporter.saved(position.step, time.perf_counter() - started)
        self._begun = position.step
        if wait:
            self._note_success()
        return True

    def _wait(self) -> None:
        """Wait for the save in the background; its failure is counted and said, but does not end the run here."""
        try:
            self._wait_for_store()
        except SaveFailedError as error:
            self._note_failure(self._take_begun(), str(error))
        else:
            self._note_success()

    def _wait_for_store(self) -> None:
        # Writing is no hang, however long it takes; where it hangs, the store's own collectives time out.
        seconds = FIRST_WAIT_S
        while self._training.store.is_writing:
            self._lifeline.note("save")
            time.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_WAIT_S)
        self._training.store.wait()

    def _take_begun(self) -> int:
        step, self._begun = self._begun, None
        assert step is not None, "a save ended that was not begun here"
        return step

    def _note_success(self) -> None:
        if self._begun is None:
            return
        self._saved = self._take_begun()
        if self.num_failed and self._training.runtime.is_main:
            logger.warning("step %d is saved, after %d that were not", self._saved, self.num_failed)
        self.num_failed = 0

    def _note_failure(self, step: int, reason: str) -> None:
        self.num_failed += 1
        self._reporter.save_failed(step, reason, self.num_failed)
        self._last_reason = reason

    def _stop_after_too_many(self) -> None:
        if self.num_failed > self._limit:
            raise self._too_many(f"{self.num_failed} saves in a row failed or were left out")

    def _too_many(self, what: str) -> CheckpointError:
        reason = self._last_reason  # of the failure that this is about, not of what `newest` may still find
        return CheckpointError(
            f"checkpoint.max_failed_saves={self._limit}: {what}. The last one: {reason} "
            f"The newest complete step is {self.newest()}. Make {checkpoint_dir(self._training.config)} writable and "
            "make room there, then start again: the run goes on from that step. "
            "Where saves are slow rather than failing, raise checkpoint.every."
        )
