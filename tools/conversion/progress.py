"""Progress in bytes: a bar with speed and time left on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

from moe_framework.observe.progress import format_duration

_SECONDS_BETWEEN_LINES = 10.0


class ByteProgress:
    """Shows how many bytes of a task are done; may be told from several threads.

    Args:
        title: What is being done.
        total: Bytes of the whole task.
        stream: Where to write; standard error by default, so that standard output stays clean.
        clock: Returns seconds.
    """

    def __init__(
        self, title: str, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._title = title
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._done = 0
        self._started = clock()
        self._last_line = self._started
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        console = Console(file=self._stream, highlight=False, markup=False)
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console)
            self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> Self:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Take the bar off the terminal's live display; a second call does nothing."""
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        """Tell that bytes are done.

        Args:
            num_bytes: How many more.
        """
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done)
            elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
                self._last_line = now
                print(self._line(now), file=self._stream, flush=True)

    def _line(self, now: float) -> str:
        speed = self._done / max(now - self._started, 1e-9)
        left = (self._total - self._done) / max(speed, 1e-9)
        return (
            f"{self._title}: {format_bytes(self._done)} of {format_bytes(self._total)}  {format_bytes(speed)}/s  "
            f"{format_duration(left)} left"
        )


def format_bytes(count: float) -> str:
    """Return bytes as text in decimal units, such as `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
