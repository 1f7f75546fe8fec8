"""Progress of an evaluation in batches: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from moe_framework.observe.progress import format_duration

_SECONDS_BETWEEN_LINES = 10.0


class BatchProgress:
    """Shows batches done, tokens/s and the time left.

    Args:
        enabled: Whether to show anything; true on rank 0 only.
        num_data_ranks: Ranks with batches of their own, whose tokens are taken to be as many as this one's.
        stream: Where to write; standard error by default, so that standard output has the report alone.
        clock: Returns seconds.
    """

    def __init__(
        self,
        *,
        enabled: bool,
        num_data_ranks: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._enabled = enabled
        self._num_data_ranks = num_data_ranks
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        # The first batch compiles and allocates: the rates leave it out.
        self._anchor: tuple[int, float] | None = None
        self._last_line = clock()
        self._num_tokens = 0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        console = Console(file=self._stream, highlight=False, markup=False)
        if enabled and console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("batch"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[state]}"))
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=None, state="")

    def __enter__(self) -> Self:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take it off the terminal's live display."""
        if self._bar is not None:
            self._bar.stop()

    def heard(self, done: int, total: int, num_tokens: int) -> None:
        """Tell that a batch is done.

        Args:
            done: Batches done.
            total: Batches of the whole evaluation.
            num_tokens: Tokens of this rank in the batch.
        """
        now = self._clock()
        if self._anchor is None:
            self._anchor = (done, now)
            return
        self._num_tokens += num_tokens
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, state=self._state(done, total, now))
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(f"batch {done}/{total}  {self._state(done, total, now)}", file=self._stream, flush=True)

    def _state(self, done: int, total: int, now: float) -> str:
        assert self._anchor is not None, "the first batch sets it"
        first, then = self._anchor
        seconds = max(now - then, 1e-9)
        left = seconds / (done - first) * (total - done)
        return f"{self._num_tokens * self._num_data_ranks / seconds:,.0f} tokens/s  {format_duration(left)} left"
