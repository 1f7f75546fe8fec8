"""Progress of reading text: a bar with documents, tokens/s and time left on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from typing import TextIO

from rich.progress import BarColumn, TextColumn

from moe_framework.observe.progress import format_duration
from tools.conversion.progress import format_bytes
from tools.live_bar import LiveBar


class TextProgress(LiveBar):
    """Shows how much text is tokenized.

    Args:
        num_bytes: Bytes on disk of all inputs.
        stream: Where to write; standard error by default, so that standard output stays clean.
        clock: Returns seconds.
    """

    def __init__(self, num_bytes: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}")
        super().__init__("tokenizing", columns, total=1.0, stream=stream, clock=clock)
        self._num_bytes = num_bytes
        self._began = self._last_line

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
        self._show(now, lambda: f"tokenizing: {state}", completed=done, state=state)
