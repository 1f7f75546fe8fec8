"""What the training loop tells of itself, and asks: one object for signals, heartbeat and hang watch."""

from collections.abc import Iterable, Iterator

from moe_framework.resilience.heartbeat import Heartbeat
from moe_framework.resilience.signals import StopRequest
from moe_framework.resilience.watch import HangWatch


class Lifeline:
    """Passes on what the loop does.

    Args:
        stop: Hears the signals.
        heartbeat: Tells the launcher's monitor.
        watch: Looks for hangs.
    """

    def __init__(self, stop: StopRequest, heartbeat: Heartbeat, watch: HangWatch):
        self._stop = stop
        self._heartbeat = heartbeat
        self._watch = watch

    @property
    def told_to_stop(self) -> bool:
        """Whether this rank was asked to save and end."""
        return self._stop.signal_name is not None

    def begin_step(self, step: int) -> None:
        """Say that a step begins."""
        self._heartbeat.beat()
        self._watch.begin_step(step)

    def note(self, activity: str) -> None:
        """Say that something other than a step begins, such as an evaluation."""
        self._heartbeat.beat()
        self._watch.note(activity)

    def beating[T](self, items: Iterable[T]) -> Iterator[T]:
        """Give the items on, and say with each that the rank goes on; for work that marks its own progress."""
        for item in items:
            self._heartbeat.beat()
            yield item
