"""Progress of an evaluation in batches: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from moe_framework.observe.progress import format_duration
from tools.live_bar import LiveBar


class BatchProgress(LiveBar):
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
        columns = TextColumn("batch"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[state]}")
        super().__init__("", columns, total=None, stream=stream, clock=clock, enabled=enabled)
        self._enabled = enabled
        self._num_data_ranks = num_data_ranks
        # The first batch compiles and allocates: the rates leave it out.
        self._anchor: tuple[int, float] | None = None
        self._num_tokens = 0

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
        if self._enabled:
            state = self._state(done, total, now)
            self._show(now, lambda: f"batch {done}/{total}  {state}", completed=done, total=total, state=state)

    def _state(self, done: int, total: int, now: float) -> str:
        assert self._anchor is not None, "the first batch sets it"
        first, then = self._anchor
        seconds = max(now - then, 1e-9)
        left = seconds / (done - first) * (total - done)
        return f"{self._num_tokens * self._num_data_ranks / seconds:,.0f} tokens/s  {format_duration(left)} left"
