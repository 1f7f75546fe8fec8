"""Progress lines on standard error, so that standard output holds the report alone."""

import sys
import time
from dataclasses import dataclass

from moe_framework.observe.progress import format_duration

QUIET_S = 3.0


def say(text: str) -> None:
    """Print a line."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Steps:
    """Counts the steps of all runs. It can be handed to a process that is started later: the clock is the machine's.

    Attributes:
        total: Steps of all runs.
        done: Steps so far.
        began: When the first run began, in seconds.
        last_line: When a line was printed last, in seconds.
    """

    total: int
    done: int
    began: float
    last_line: float

    @classmethod
    def starting_now(cls, total: int) -> "Steps":
        """Start counting."""
        now = time.monotonic()
        return cls(total, 0, now, now)

    def advance(self, label: str) -> None:
        """Count a step; print a line if none was printed for a few seconds."""
        self.done += 1
        now = time.monotonic()
        if now - self.last_line < QUIET_S:
            return
        self.last_line = now
        left = (now - self.began) / self.done * (self.total - self.done)
        say(f"{label}: step {self.done} of {self.total} in all, about {format_duration(left)} left")
