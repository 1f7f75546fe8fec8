"""Timing of alternatives against each other: interleaved repetitions, medians, quartiles."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it, in the samples' unit."""

    median: float
    lower_quartile: float
    upper_quartile: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Summarise one or more samples."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, lower, upper)

    def scaled(self, factor: float) -> "Spread":
        """Return the same in another unit."""
        return Spread(self.median * factor, self.lower_quartile * factor, self.upper_quartile * factor)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Summarise the quotients of each repetition.

    The two times of a repetition were taken one after the other, so that their quotient keeps clear of a load
    that comes and goes between repetitions; a quotient of medians does not.
    """
    return Spread.of([a / b for a, b in zip(numerators, denominators, strict=True)])


def elapsed(function: Callable[[], object], device: torch.device) -> float:
    """Run a function and wait for its work.

    Args:
        function: Called once.
        device: Where its work runs; on CUDA two events are recorded around it on the current stream.

    Returns:
        Seconds.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        function()
        return time.perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    function()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3


def interleave(
    alternatives: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    warmup: int,
    repetitions: int,
    before_each: Callable[[], object] = lambda: None,
    after_repetition: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Time alternatives in turn, so that they share whatever else the machine does.

    Args:
        alternatives: Functions by name.
        device: Where their work runs.
        warmup: Repetitions that are not kept.
        repetitions: Repetitions that are.
        before_each: Called, untimed, before every function, such as a barrier.
        after_repetition: Called, untimed, after every repetition, warm-up included.

    Returns:
        Seconds of each repetition, by name.

    Collective: whatever the functions call; then every rank must call with the same arguments.
    """
    samples: dict[str, list[float]] = {name: [] for name in alternatives}
    for repetition in range(warmup + repetitions):
        # Every other repetition runs backwards, so that none always profits from the caches its neighbour left.
        names = list(alternatives)[:: 1 if repetition % 2 == 0 else -1]
        for name in names:
            before_each()
            seconds = elapsed(alternatives[name], device)
            if repetition >= warmup:
                samples[name].append(seconds)
        after_repetition()
    return samples
