"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

SECONDS_BETWEEN_LINES = 10.0


class LiveBar:
    """A bar where somebody looks, and a line every ten seconds where nobody does; what they say is the subclass's.

    Args:
        title: What is being done.
        columns: Of the bar; they may use the field `state`.
        total: The bar's whole; None where it is not known yet.
        stream: Where to write; standard error by default, so that standard output stays clean.
        clock: Returns seconds.
        enabled: Whether there may be a bar.
    """

    def __init__(
        self,
        title: str,
        columns: tuple[ProgressColumn, ...],
        *,
        total: float | None,
        stream: TextIO | None,
        clock: Callable[[], float] = time.monotonic,
        enabled: bool = True,
    ):
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._last_line = clock()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        console = Console(file=self._stream, highlight=False, markup=False)
        if enabled and console.is_terminal and not console.is_dumb_terminal:
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task(title, total=total, state="")

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

    def _show(self, now: float, line: Callable[[], str], **fields: Any) -> None:
        """Move the bar, or write a line if the last one is long ago.

        Args:
            now: What the clock says.
            line: Makes the line.
            **fields: Of the bar, as `rich.progress.Progress.update` takes them.
        """
        if self._bar is not None:
            self._bar.update(self._task, **fields)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(line(), file=self._stream, flush=True)
