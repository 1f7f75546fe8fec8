"""Progress of reading text: a bar with documents, tokens/s and time left on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from moe_framework.observe.progress import format_duration
from tools.conversion.progress import format_bytes

_SECONDS_BETWEEN_LINES = 10.0


class TextProgress:
    """Shows how much text is tokenized.

    Args:
        num_bytes: Bytes on disk of all inputs.
        stream: Where to write; standard error by default, so that standard output stays clean.
        clock: Returns seconds.
    """

    def __init__(self, num_bytes: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._num_bytes = num_bytes
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._began = self._last_line = clock()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        console = Console(file=self._stream, highlight=False, markup=False)
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("tokenizing", total=1.0, state="")

    def __enter__(self) -> Self:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take it off the terminal's live display."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: float, num_bytes: int, num_documents: int, num_tokens: int) -> None:
        """Tell how far it is.

        Args:
            done: Share of the whole work, in [0, 1].
            num_bytes: Bytes on disk read.
            num_documents: Documents written.
            num_tokens: Tokens written.
        """
        now = self._clock()
        seconds = max(now - self._began, 1e-9)
        left = format_duration(seconds / done * (1 - done)) if done > 0 else "?"
        state = (
            f"{format_bytes(num_bytes)} of {format_bytes(self._num_bytes)}  {num_documents:,} documents  "
            f"{num_tokens / seconds:,.0f} tokens/s  {left} left"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=done, state=state)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(f"tokenizing: {state}", file=self._stream, flush=True)
