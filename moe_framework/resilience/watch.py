"""The watch over a rank's progress: a thread that reports when there has been none for too long."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

from moe_framework.errors import ExitCode
from moe_framework.model.decoder import Decoder
from moe_framework.resilience.collectives import is_of_collectives
from moe_framework.resilience.hang_folder import HangFolder
from moe_framework.resilience.hang_report import SILENT, RankReport, report_of, to_text
from moe_framework.resilience.hooks import watch_model
from moe_framework.resilience.marks import TRAINING, MarkLog

# The ranks fall silent within a step or so of each other; a rank that is dead or stopped costs the whole wait.
MAX_GRACE_S = 60.0
MIN_GRACE_S = 2.0
# Before the first rank leaves, so that the others end by themselves and not because it is gone.
LEAVE_AFTER_S = 1.0


class Silence:
    """How long a rank has made no progress, in time during which the observer itself was awake.

    A process that was stopped and continued finds that much time has passed; that is not its silence.

    Args:
        poll_s: Time between two observations, if all is well.
    """

    def __init__(self, poll_s: float):
        self._most_s = 2 * poll_s
        self._newest: object = None
        self._last_s: float | None = None
        self.seconds = 0.0

    def observe(self, now_s: float, newest: object) -> float:
        """Return the silence in seconds.

        Args:
            now_s: A clock that only goes on, such as `time.monotonic()`.
            newest: The last sign of progress, another object after each.
        """
        if newest is not self._newest or self._last_s is None:
            self.seconds = 0.0
        else:
            self.seconds += min(now_s - self._last_s, self._most_s)
        self._newest, self._last_s = newest, now_s
        return self.seconds


class HangWatch:
    """Watches one rank from the start of the block to its end.

    When the rank has made no progress for `timeout_s`, it writes `rank_N.txt`; the lowest rank that can merges all of
    them into `report.txt`. Nothing here communicates but through the folder.

    Args:
        directory: Folder of the reports; made when there is one to write.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Seconds without progress; 0 for no watch.
        abort: End the process with `ExitCode.HUNG` after the report. Without it, the watch goes on.
        end_process: Ends it; another one is for tests.
    """

    def __init__(
        self,
        *,
        directory: Path,
        rank: int,
        world_size: int,
        timeout_s: float,
        abort: bool,
        end_process: Callable[[int], None] = os._exit,
    ):
        self._rank, self._world_size = rank, world_size
        self._timeout_s, self._abort, self._end_process = timeout_s, abort, end_process
        self._folder = HangFolder(directory)
        self._log = MarkLog()
        self._poll_s = max(min(1.0, timeout_s / 10), 0.01)
        self._grace_s = min(MAX_GRACE_S, max(MIN_GRACE_S, timeout_s / 4))
        self._undo = ExitStack()
        self._ended = threading.Event()
        self._reported = False
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)

    @property
    def _enabled(self) -> bool:
        return self._timeout_s > 0

    def attach(self, model: Decoder) -> None:
        """Let the model mark its progress until the block ends.

        Args:
            model: Parallelised.
        """
        if self._enabled:
            self._undo.callback(watch_model(model, self._log))

    def begin_step(self, step: int) -> None:
        """Say that an optimizer step begins.

        Args:
            step: Its number, from 1.
        """
        self._log.enter(TRAINING, step)

    def note(self, part: str) -> None:
        """Say that something else begins, which is progress too; every rank must.

        Args:
            part: Such as `evaluation`, `save` or `load`.
        """
        self._log.enter(part, self._log.step)

    def __enter__(self) -> Self:
        """Begin to watch; rank 0 sets the reports of an earlier hang aside."""
        if self._enabled:
            if self._rank == 0:
                self._try(self._folder.set_aside)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        """End the watch. After an error of a collective, leave a report: the ranks may have begun different ones."""
        if not self._enabled:
            return
        if error is None:
            self.note("end")
        self._ended.set()
        # If it reports, the error is likely that another rank has left, which must not end this one before its report.
        self._thread.join(3 * self._grace_s)
        if error is not None and is_of_collectives(error) and not self._reported:
            self._try(partial(self._report_error, error))
        self._undo.close()

    def _watch(self) -> None:
        silence = Silence(self._poll_s)
        while not self._ended.wait(self._poll_s):
            newest = self._log.newest
            seconds = silence.observe(time.monotonic(), newest)
            if self._reported and seconds == 0.0:
                self._go_on()
            if not self._reported and seconds >= self._timeout_s:
                self._reported = True
                self._try(partial(self._report_hang, seconds))
                # Other ranks that wait for this one see its progress too, and go on.
                if self._abort and self._log.newest is newest:
                    time.sleep(LEAVE_AFTER_S)
                    self._end_process(int(ExitCode.HUNG))

    def _go_on(self) -> None:
        self._reported = False
        _say(f"rank {self._rank}: goes on after its hang report: it was slow, not hung")
        if self._rank == 0:
            self._try(self._folder.set_aside)

    def _report_hang(self, seconds: float) -> None:
        report = self._report(f"{SILENT} for {seconds:.1f} s (resilience.hang_timeout_s={self._timeout_s:g})")
        since_ns = report.marks[-1].time_ns
        if self._is_merger(since_ns):
            self._merge(report, since_ns)

    def _is_merger(self, since_ns: int) -> bool:
        """Wait until this rank is to merge, or another one has."""
        if self._rank == 0:
            self._wait(partial(self._all_reported, since_ns), self._grace_s)
            return True
        # Rank 0 has merged by then, unless it is dead, stopped or blocked; then the lowest that has reported does.
        is_merged = partial(self._folder.is_merged, since_ns)
        if self._wait(is_merged, 1.5 * self._grace_s):
            return False
        is_lowest = not any(self._folder.reported(rank, since_ns) for rank in range(self._rank))
        return is_lowest or not self._wait(is_merged, self._grace_s)

    def _report_error(self, error: BaseException) -> None:
        """Report without waiting for anyone: the last rank to fail merges what there is."""
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        report = self._report(f"ended by {line}", error)
        # A rank that was stopped fails when it goes on, long after the others have reported.
        self._merge(report, min(report.marks[-1].time_ns, report.written_ns - int(self._timeout_s * 1e9)))

    def _report(self, reason: str, error: BaseException | None = None) -> RankReport:
        report = report_of(self._log, rank=self._rank, world_size=self._world_size, reason=reason, error=error)
        try:
            self._folder.write(report)
            _say(f"rank {self._rank}: {reason}; {report.place}; {self._folder.rank_path(self._rank)}")
        except OSError as failed:  # such as a full disk
            _say(f"{failed}; the report that could not be written:\n{to_text(report)}")
        return report

    def _all_reported(self, since_ns: int) -> bool:
        return all(self._folder.reported(rank, since_ns) for rank in range(self._world_size))

    def _wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not (true := condition()) and time.monotonic() < deadline:
            time.sleep(self._poll_s)
        return true

    def _merge(self, report: RankReport, since_ns: int) -> None:
        reports = {report.rank: report} | self._folder.reports(self._world_size, since_ns)
        self._folder.merge(reports, written_by=self._rank, world_size=self._world_size)
        _say(f"hang report: {self._folder.page_path}")

    def _try(self, action: Callable[[], None]) -> None:
        """Do it if possible: a report that cannot be written must not keep the watch from ending a hung rank."""
        try:
            action()
        except Exception:
            _say(f"rank {self._rank}: the hang report failed:\n{traceback.format_exc()}")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
