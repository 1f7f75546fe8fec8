"""Profiles a few steps and says where their time went."""

import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from moe_framework.config.schema import Config
from moe_framework.model.decoder import Decoder
from tools.benchmarks.breakdown import ranges
from tools.benchmarks.breakdown.attribute import UNATTRIBUTED, Piece, Whose, device_pieces, host_pieces, share_out
from tools.benchmarks.breakdown.trace import Trace, read_trace
from tools.benchmarks.breakdown.work import Work, work_of_parts
from tools.benchmarks.ceilings import Ceilings

STEPS = 3
TOP = 25


@dataclass(frozen=True)
class Part:
    """One part of the step.

    Attributes:
        name: One of `ranges.PARTS`, or `unattributed`.
        seconds: Of the step that are its own: with the idle time, the parts add up to the step.
        busy_seconds: Sum of its kernels, also while another part's were running.
        share: Of the step, 0 to 1.
        work: What it has to do; None where there is no formula.
        rate: Work per second of `seconds`; None without work or time.
        floor_seconds: Work at the measured ceiling.
        floor_over_time: floor_seconds / seconds.
    """

    name: str
    seconds: float
    busy_seconds: float
    share: float
    work: Work | None
    rate: float | None
    floor_seconds: float | None
    floor_over_time: float | None


@dataclass(frozen=True)
class Kernel:
    """A kernel, or on a CPU an operation, in all its calls.

    Attributes:
        name: As the profiler gives it.
        part: Whose it is.
        seconds: Per step.
        calls: Per step.
    """

    name: str
    part: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class Wait:
    """How long nothing ran until a kernel came.

    Attributes:
        name: Of the kernel; empty for the end of the steps.
        part: Whose it is.
        seconds: Per step.
    """

    name: str
    part: str
    seconds: float


@dataclass(frozen=True)
class Communication:
    """The collectives of one part; a kernel that waits for a slower rank counts as one that sends.

    Attributes:
        part: Whose they are.
        seconds: Sum of their kernels, per step.
        exposed_seconds: Of the step, in which no computation ran beside them.
    """

    part: str
    seconds: float
    exposed_seconds: float

    @property
    def hidden(self) -> float:
        """Share of their time in which computation ran, 0 to 1."""
        return max(0.0, 1 - self.exposed_seconds / self.seconds)


@dataclass(frozen=True)
class Breakdown:
    """Where the time of a step went, on rank 0.

    Attributes:
        steps: Profiled steps.
        step_seconds: One of them; profiling slows the host down, so it is more than without.
        idle_seconds: Of it, in which no kernel ran (on a CPU: no operation).
        parts: By time.
        communication: Of the parts that have some, by time; empty on a CPU, where a collective's threads are not seen.
        top_kernels: By time.
        waits: By time; all together are the idle time.
    """

    steps: int
    step_seconds: float
    idle_seconds: float
    parts: list[Part]
    communication: list[Communication]
    top_kernels: list[Kernel]
    waits: list[Wait]


def measure_breakdown(
    step: Callable[[], object], model: Decoder, config: Config, device: torch.device, ceilings: Ceilings
) -> Breakdown:
    """Profile some steps; they must be warm.

    Args:
        step: One training step of `model`.
        model: Ours.
        config: Its configuration.
        device: This rank's.
        ceilings: Measured in this run.

    Returns:
        This rank's breakdown.

    Collective: the world; every rank must call.
    """
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with ranges.ranges_around_parts(model):
        step()  # a wrapped function may be compiled anew
        if on_cuda:
            torch.cuda.synchronize(device)
        with profile(activities=activities, acc_events=True) as profiler:
            for _ in range(STEPS):
                with record_function(ranges.STEP):
                    step()
            if on_cuda:
                torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = read_trace(file)
    return summarise(trace, work_of_parts(config, dist.get_world_size()), ceilings)


def summarise(trace: Trace, work: dict[str, Work], ceilings: Ceilings) -> Breakdown:
    """Read a trace of whole steps.

    Args:
        trace: With a range `ranges.STEP` around each step.
        work: Of each part.
        ceilings: Of the device.

    Returns:
        Averages over the steps.
    """
    steps = [event for event in trace.host if event.name == ranges.STEP]
    pieces = device_pieces(trace) if trace.device else host_pieces(trace)
    start = min(step.start for step in steps)
    end = max([step.end for step in steps] + [event.end for event in trace.device])
    inside = [piece for piece in pieces if piece.start >= start]
    own, idle = share_out(inside, start, end)
    to_seconds = 1e-6 / len(steps)
    whole = (end - start) * to_seconds
    shares = {whose: time * to_seconds for whose, time in own.items()}
    busy: dict[Whose, float] = defaultdict(float)
    for piece in inside:
        busy[Whose(piece.part, piece.is_communication)] += (piece.end - piece.start) * to_seconds
    names = [name for name in (*ranges.PARTS, UNATTRIBUTED) if any(name == part for part, _ in busy)]
    parts = [_part(name, _total(shares, name), _total(busy, name), whole, work.get(name), ceilings) for name in names]
    communication = [
        Communication(whose.part, seconds, shares.get(whose, 0.0))
        for whose, seconds in busy.items()
        if trace.device and whose.is_communication
    ]
    return Breakdown(
        steps=len(steps),
        step_seconds=whole,
        idle_seconds=sum(idle.values()) * to_seconds,
        parts=sorted(parts, key=lambda part: -part.seconds),
        communication=sorted(communication, key=lambda part: -part.seconds),
        top_kernels=_top(inside, len(steps)),
        waits=sorted(
            (Wait(name, part, time * to_seconds) for (part, name), time in idle.items()), key=lambda wait: -wait.seconds
        ),
    )


def _total(seconds: dict[Whose, float], part: str) -> float:
    return sum(value for whose, value in seconds.items() if whose.part == part)


def _part(name: str, seconds: float, busy: float, whole: float, work: Work | None, ceilings: Ceilings) -> Part:
    limit = _limit(work, ceilings)
    floor = None if work is None or limit is None else work.amount / limit
    return Part(
        name,
        seconds,
        busy,
        share=seconds / whole,
        work=work,
        rate=None if work is None or seconds == 0 else work.amount / seconds,
        floor_seconds=floor,
        floor_over_time=None if floor is None or seconds == 0 else floor / seconds,
    )


def _limit(work: Work | None, ceilings: Ceilings) -> float | None:
    if work is None:
        return None
    if work.unit == "FLOP":
        return ceilings.fp8_flops if work.fp8 and ceilings.fp8_flops else ceilings.bf16_flops
    return ceilings.copy_bytes if work.unit == "bytes" else ceilings.exchange_bytes


def _top(pieces: list[Piece], steps: int) -> list[Kernel]:
    found: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.name, piece.part].append(piece)
    kernels = [
        Kernel(name, part, sum(p.end - p.start for p in own) * 1e-6 / steps, sum(p.calls for p in own) / steps)
        for (name, part), own in found.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.seconds)[:TOP]
