"""Timing of one contender's steps on every rank; a contender that fails becomes a row with its error."""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tools.benchmarks.timing import Spread
from tools.benchmarks.train_step.contender import Contender, Facts

MAX_ERROR_LENGTH = 500


@dataclass(frozen=True)
class Row:
    """What one contender did.

    Attributes:
        name: Such as `hf_eager` or `ours:bf16`.
        error: Why it has no numbers, with the rank; None if it ran.
        facts: In what its step differs; None if it could not be built.
        num_parameters: Of the whole model.
        step_seconds: Each kept step, of the slowest rank.
        seconds: Their median and quartiles.
        tokens_per_second_per_gpu: At the median.
        model_flops_per_second_per_gpu: By `observe.throughput.flops_per_token`, at the median.
        peak_bytes: Largest memory allocated by torch in any step, warm-up included, of the worst rank, without what
            contenders before it had left allocated; None on a CPU.
        allocated_before_bytes: What they had left, of the worst rank; None on a CPU.
        first_loss: Before the first update, mean over ranks, nats per target.
        last_loss: Before the last update.
        build_seconds: Until the first step could start.
        ratios: Tokens/s over those of each peer that ran, by the peer's name.
        breakdown: Where the time goes; ours only, on request.
    """

    name: str
    error: str | None = None
    facts: Facts | None = None
    num_parameters: int | None = None
    step_seconds: list[float] = field(default_factory=list)
    seconds: Spread | None = None
    tokens_per_second_per_gpu: float | None = None
    model_flops_per_second_per_gpu: float | None = None
    peak_bytes: int | None = None
    allocated_before_bytes: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    build_seconds: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    breakdown: Any = None


class ContenderFailedError(Exception):
    """A contender failed on at least one rank; raised on every rank."""


def measure(
    name: str,
    build: Callable[[], Contender],
    device: torch.device,
    *,
    warmup: int,
    repetitions: int,
    tokens_per_gpu: float,
    flops_per_token: float,
    profile: Callable[[Contender], Any] | None = None,
) -> Row:
    """Build a contender, train it for some steps, and free it.

    No step waits for the host before the next one is launched, as in training: events are recorded between steps
    and read at the end. A rank that fails alone leaves the others waiting for it until their collective times out.

    Args:
        name: Of the row.
        build: Makes it.
        device: This rank's.
        warmup: Steps that are not kept.
        repetitions: Steps that are.
        tokens_per_gpu: Of one step.
        flops_per_token: Of forward and backward.
        profile: Called after the timed steps.

    Returns:
        The row, the same on every rank.

    Collective: the world; every rank must call.
    """
    free_memory(device)
    left = _allocated(device)
    before = _largest(left)
    # In a function of its own, so that nothing holds the contender when its memory is given back.
    found = _run(build, device, warmup, repetitions, profile)
    free_memory(device)
    row = Row(name, error=found.error, facts=found.facts, allocated_before_bytes=before)
    if found.error is not None:
        return row
    times = torch.tensor(found.seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    ends = torch.tensor([found.losses[0], found.losses[-1]], dtype=torch.float64)
    dist.all_reduce(ends)
    first, last = (ends / dist.get_world_size()).tolist()
    spread = Spread.of(times.tolist())
    rate = tokens_per_gpu / spread.median
    return replace(
        row,
        error=None if math.isfinite(first) and math.isfinite(last) else f"loss is not finite: {first}, then {last}",
        num_parameters=found.num_parameters,
        step_seconds=times.tolist(),
        seconds=spread,
        tokens_per_second_per_gpu=rate,
        model_flops_per_second_per_gpu=rate * flops_per_token,
        peak_bytes=_largest(None if found.peak_bytes is None or left is None else found.peak_bytes - left),
        first_loss=first,
        last_loss=last,
        build_seconds=found.build_seconds,
        breakdown=found.breakdown,
    )


@dataclass
class _Outcome:
    """What this rank knows of a contender; `error` is the same on every rank."""

    error: str | None = None
    facts: Facts | None = None
    num_parameters: int = 0
    build_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    breakdown: Any = None


def _run(
    build: Callable[[], Contender],
    device: torch.device,
    warmup: int,
    repetitions: int,
    profile: Callable[[Contender], Any] | None,
) -> _Outcome:
    outcome = _Outcome()
    began = time.monotonic()
    try:
        contender = _together(build)
        outcome.facts, outcome.num_parameters = contender.facts, contender.num_parameters
        outcome.build_seconds = time.monotonic() - began
        # Ranks meet after the warm-up: else a rank's first step would hold its wait for the others.
        first = _together(partial(_warm_up, contender, device, warmup))
        outcome.seconds, losses, outcome.peak_bytes = _together(partial(_train, contender, device, repetitions))
        outcome.losses = [float(loss) for loss in (*first, *losses)]
        if profile is not None:
            outcome.breakdown = _together(partial(profile, contender))
    except ContenderFailedError as error:
        outcome.error = str(error)
    return outcome


def _warm_up(contender: Contender, device: torch.device, steps: int) -> list[Tensor | float]:
    """Losses of steps that are not timed; the peak of memory counts from here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    losses = [contender.step() for _ in range(steps)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return losses


def _train(
    contender: Contender, device: torch.device, steps: int
) -> tuple[list[float], list[Tensor | float], int | None]:
    """Seconds and loss of each step on this rank, and the peak of memory."""
    losses: list[Tensor | float] = []
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(steps):
            losses.append(contender.step())
            times.append(time.perf_counter())
        return [end - start for start, end in pairwise(times)], losses, None
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        losses.append(contender.step())
        event.record()
    torch.cuda.synchronize(device)
    seconds = [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]
    return seconds, losses, torch.cuda.max_memory_allocated(device)


def _together[T](action: Callable[[], T]) -> T:
    """Return an action's result, or raise the failures of all ranks on every rank."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_ERROR_LENGTH]
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    named = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
    if named:
        # The same text on all ranks is said once.
        texts = {text.partition(": ")[2] for text in named}
        raise ContenderFailedError(texts.pop() if len(texts) == 1 and len(named) == len(failures) else named[0])
    return result  # pyright: ignore[reportReturnType]  # set, since nothing was raised


def free_memory(device: torch.device) -> None:
    """Give back what a contender leaves in caches and reference cycles."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _largest(own: int | None) -> int | None:
    """The largest value of any rank; None where no rank has one."""
    box = torch.tensor(-1 if own is None else own)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return None if int(box) < 0 else int(box)
