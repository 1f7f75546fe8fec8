"""The progress of a run on rank 0: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Shows steps, loss, tokens/s and the time left.

    Args:
        total_steps: Optimizer steps of the whole run.
        first_step: Steps done before this process started.
        enabled: Whether to show anything; true on rank 0 only.
        stream: Where to write; standard output by default.
        every: Steps between plain lines. The bar moves with every step.
        clock: Returns seconds.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        enabled: bool,
        stream: TextIO | None = None,
        every: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total_steps = total_steps
        self._every = every
        self._enabled = enabled
        self._clock = clock
        self._anchor = (first_step, clock())
        self._first_step = first_step
        self._stream = sys.stdout if stream is None else stream
        console = Console(file=self._stream, highlight=False, markup=False)
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        if enabled and console.is_terminal and not console.is_dumb_terminal:
            self._bar = RichProgress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[state]}"),
                console=console,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=first_step, state="")
            self._bar.start()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show a finished step.

        Args:
            step: Optimizer steps done.
            loss: Loss of this step, nats per target token.
            tokens_per_second: Tokens/s of all ranks together.
        """
        if not self._enabled:
            return
        state = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {format_duration(self._seconds_left(step))} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, state=state)
        elif step % self._every == 0 or step in (self._first_step + 1, self._total_steps):
            print(f"step {step}/{self._total_steps}  {state}", file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Print a line of its own; the bar stays below it."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.console.print(text, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Take the bar off the terminal's live display; lines stay."""
        if self._bar is not None:
            self._bar.stop()

    def _seconds_left(self, step: int) -> float:
        anchor_step, anchor_time = self._anchor
        now = self._clock()
        if step == self._first_step + 1:
            # The first step compiles and allocates: later estimates leave it out.
            self._anchor = (step, now)
        return (now - anchor_time) / max(step - anchor_step, 1) * (self._total_steps - step)


def format_duration(seconds: float) -> str:
    """Return seconds as `h:mm:ss`, or `m:ss` under an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
