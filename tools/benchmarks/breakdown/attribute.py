"""Which part of the step a piece of a trace belongs to, and how the step's time is shared out among the parts."""

import heapq
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from tools.benchmarks.breakdown import ranges
from tools.benchmarks.breakdown.trace import DeviceEvent, HostEvent, Trace

FSDP_PREFIX = "FSDP::"
OPTIMIZER_PREFIX = "Optimizer."
COMMUNICATION = ("c10d::", "_c10d_functional::", "gloo:", "nccl", "record_param_comms")
UNATTRIBUTED = "unattributed"


class Piece(NamedTuple):
    """Work of one part on the device, or of the host where there is no device.

    Attributes:
        start: Microseconds.
        end: Microseconds.
        part: One of `ranges.PARTS`, or `UNATTRIBUTED`.
        name: Of the kernel or operation.
        is_communication: Whether it may overlap with computation, which then counts first.
        calls: 1, or 0 for the rest of an operation that others interrupted.
    """

    start: float
    end: float
    part: str
    name: str
    is_communication: bool
    calls: int = 1


class Attribution:
    """Finds the part of a host event: by the innermost range around it, or around what it is the gradient of.

    Args:
        trace: Of whole steps.
    """

    def __init__(self, trace: Trace):
        self._makers: dict[tuple[int, int], HostEvent] = {}
        self._steps = [e for e in trace.host if e.name == ranges.STEP]
        self._main_thread = self._steps[0].thread if self._steps else (trace.host[0].thread if trace.host else 0)
        backward = [e for e in trace.host if e.forward_thread and e.sequence is not None]
        # torch numbers threads from 1 as they first run an operation: the forward pass's is the smallest.
        self._first_forward_thread = min((e.forward_thread for e in backward), default=0)
        self._backward_ends = [
            max((e.end for e in backward if step.start <= e.start < step.end), default=step.end) for step in self._steps
        ]
        for event in trace.host:
            # Many operations see the same next sequence number; the last to start is the one that uses it up.
            if event.sequence is not None and not event.forward_thread and event.category == "cpu_op":
                self._makers[event.thread, event.sequence] = event

    def part_of(self, event: HostEvent | None) -> str:
        """Return the part of a host event."""
        part = UNATTRIBUTED if event is None else self._part(event, depth=0)
        communicates = event is not None and any(e.name.startswith(COMMUNICATION) for e in event.ancestry())
        return _part_of_communication(part) if communicates else part

    def _part(self, event: HostEvent, depth: int) -> str:
        for around in event.ancestry():
            if around.name.startswith(ranges.PREFIX) and around.name != ranges.STEP:
                return around.name.removeprefix(ranges.PREFIX)
            if around.name.startswith(FSDP_PREFIX):
                return ranges.SHARDING
            if around.name.startswith(OPTIMIZER_PREFIX):
                return ranges.OPTIMIZER
            if around.forward_thread and around.sequence is not None and depth < 8:
                maker = self._makers.get((self._forward_thread(around), around.sequence))
                if maker is not None and maker.start < around.start:
                    return self._part(maker, depth + 1)
        return self._outside_all_ranges(event)

    def _forward_thread(self, node: HostEvent) -> int:
        # A node made during backward, by a recomputation, runs on the thread that made it.
        return self._main_thread if node.forward_thread == self._first_forward_thread else node.thread

    def _outside_all_ranges(self, event: HostEvent) -> str:
        """After the step's backward pass come norm, clipping and update; before it, there is nothing to name."""
        for step, backward_end in zip(self._steps, self._backward_ends, strict=True):
            if step.start <= event.start < step.end and event.thread == step.thread:
                return ranges.OPTIMIZER if event.start >= backward_end else UNATTRIBUTED
        return UNATTRIBUTED


def _part_of_communication(part: str) -> str:
    """Exchanges inside a MoE layer carry tokens; the optimizer's sums stay its own; all others are FSDP's."""
    if part in (ranges.PERMUTATION, ranges.EXCHANGE):
        return ranges.EXCHANGE
    return part if part in (ranges.OPTIMIZER, ranges.ROUTER, ranges.HEAD) else ranges.SHARDING


def device_pieces(trace: Trace) -> list[Piece]:
    """Attribute every kernel by the host's call that launched it."""
    attribution = Attribution(trace)
    return [_device_piece(attribution, event) for event in trace.device]


def _device_piece(attribution: Attribution, event: DeviceEvent) -> Piece:
    communicates = event.name.lower().startswith("nccl")
    part = attribution.part_of(event.launched_by)
    return Piece(
        event.start, event.end, _part_of_communication(part) if communicates else part, event.name, communicates
    )


def host_pieces(trace: Trace) -> list[Piece]:
    """Attribute the own time of every operation, where the host computes."""
    attribution = Attribution(trace)
    pieces = []
    for event in trace.host:
        if event.category != "cpu_op":
            continue
        part = attribution.part_of(event)
        communicates = event.name.startswith(COMMUNICATION)
        pieces += [
            Piece(start, end, part, event.name, communicates, int(index == 0))
            for index, (start, end) in enumerate(event.own_time())
        ]
    return pieces


class Whose(NamedTuple):
    """To what a moment is given.

    Attributes:
        part: One of `ranges.PARTS`, or `UNATTRIBUTED`.
        is_communication: Whether nothing but communication ran.
    """

    part: str
    is_communication: bool


# What the device waited for at the end of the whole.
END = ("", "")


def share_out(
    pieces: Iterable[Piece], start: float, end: float
) -> tuple[dict[Whose, float], dict[tuple[str, str], float]]:
    """Give every moment to one part, so that the parts and the idle time add up to the whole.

    Where pieces overlap, computation counts before communication, and the earlier before the later.

    Args:
        pieces: Of one device, or of one host thread.
        start: Of the whole, in microseconds.
        end: Of the whole.

    Returns:
        Microseconds of each part's computation and of its communication that no computation hid; and those in which
        nothing ran, by the part and the name of the piece that came next, `END` where none did.
    """
    ordered = sorted((p for p in pieces if p.end > start and p.start < end), key=lambda p: p.start)
    totals: dict[Whose, float] = defaultdict(float)
    running: list[tuple[bool, float, int, float, str]] = []
    idle: dict[tuple[str, str], float] = defaultdict(float)
    at, next_piece = start, 0
    while at < end:
        while next_piece < len(ordered) and ordered[next_piece].start <= at:
            piece = ordered[next_piece]
            heapq.heappush(running, (piece.is_communication, piece.start, next_piece, piece.end, piece.part))
            next_piece += 1
        while running and running[0][3] <= at:
            heapq.heappop(running)
        until = ordered[next_piece].start if next_piece < len(ordered) else end
        if running:
            until = min(until, running[0][3])
            is_communication, _, _, _, part = running[0]
            totals[Whose(part, is_communication)] += min(until, end) - at
        else:
            follows = END if next_piece == len(ordered) else (ordered[next_piece].part, ordered[next_piece].name)
            idle[follows] += min(until, end) - at
        at = min(until, end)
    return dict(totals), dict(idle)
