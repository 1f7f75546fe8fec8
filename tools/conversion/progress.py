"""Progress in bytes: a bar with speed and time left on a terminal, plain lines elsewhere."""

import threading
import time
from collections.abc import Callable
from typing import TextIO

from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

from moe_framework.observe.progress import format_duration
from tools.live_bar import LiveBar


class ByteProgress(LiveBar):
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
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn(), TimeRemainingColumn()
        super().__init__(title, columns, total=total, stream=stream, clock=clock)
        self._title = title
        self._total = total
        self._done = 0
        self._started = self._last_line
        self._lock = threading.Lock()

    def advance(self, num_bytes: int) -> None:
        """Tell that bytes are done.

        Args:
            num_bytes: How many more.
        """
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            self._show(now, lambda: self._line(now), completed=self._done)

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
