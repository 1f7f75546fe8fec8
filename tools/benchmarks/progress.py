"""Progress lines on standard error, so that standard output holds the report alone."""

import sys
import time

from moe_framework.observe.progress import format_duration

QUIET_S = 3.0


class ProgressLines:
    """Says what is measured and how long the rest may take, in a run of more than a few seconds.

    It can be handed to a process that is started later: the clock is the machine's.

    Args:
        total: Repetitions of the whole run.
    """

    def __init__(self, total: int):
        self._total = total
        self._done = 0
        self._began = self._last_line = time.monotonic()

    def advance(self, label: str) -> None:
        """Count a repetition; print a line if none was printed for a few seconds."""
        self._done += 1
        now = time.monotonic()
        if now - self._last_line < QUIET_S:
            return
        self._last_line = now
        left_s = (now - self._began) / self._done * (self._total - self._done)
        print(f"{label}: {self._done}/{self._total} repetitions, {format_duration(left_s)} left", file=sys.stderr)

    def skip(self, repetitions: int) -> None:
        """Count repetitions that another process reported."""
        self._done += repetitions
