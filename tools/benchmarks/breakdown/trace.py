"""A profiler trace as a tree of what ran on the host, and the kernels that it launched.

The Chrome trace is read, because it keeps what links a kernel to the call that launched it, and a node of the
backward pass to the operation of the forward pass that made it: the sequence number.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(eq=False)
class HostEvent:
    """Something that ran on a host thread.

    Attributes:
        name: Of the operation, range or call.
        category: One of `HOST`.
        thread: The system's number of the thread.
        start: Microseconds.
        end: Microseconds.
        sequence: Sequence number; None where it makes, and is, no node of the backward pass.
        forward_thread: torch's number of the thread of the forward operation, for a node of the backward pass;
            0 for anything else.
        parent: The innermost event around it.
        children: The events directly inside it.
    """

    name: str
    category: str
    thread: int
    start: float
    end: float
    sequence: int | None = None
    forward_thread: int = 0
    parent: "HostEvent | None" = None
    children: "list[HostEvent]" = field(default_factory=list)

    def ancestry(self) -> "Iterator[HostEvent]":
        """Yield the event and all around it, the innermost first."""
        event: HostEvent | None = self
        while event is not None:
            yield event
            event = event.parent

    def own_time(self) -> Iterator[tuple[float, float]]:
        """Yield the intervals in which none of its children ran."""
        at = self.start
        for child in self.children:
            if child.start > at:
                yield at, child.start
            at = max(at, child.end)
        if self.end > at:
            yield at, self.end


@dataclass(frozen=True)
class DeviceEvent:
    """A kernel, copy or fill on a GPU.

    Attributes:
        name: Of the kernel.
        start: Microseconds.
        end: Microseconds.
        launched_by: The host's call, or None where the trace lacks it.
    """

    name: str
    start: float
    end: float
    launched_by: HostEvent | None


@dataclass(frozen=True)
class Trace:
    """A trace.

    Attributes:
        host: All host events, by thread and time.
        device: All device events by time; empty on a CPU.
    """

    host: list[HostEvent]
    device: list[DeviceEvent]


def read_trace(file: Path) -> Trace:
    """Read the file that `export_chrome_trace` wrote."""
    return parse_trace(json.loads(file.read_text(encoding="utf-8", errors="replace"))["traceEvents"])


def parse_trace(events: Iterable[dict]) -> Trace:
    """Build the tree from the events of a Chrome trace.

    Args:
        events: Its `traceEvents`.

    Returns:
        The trace.
    """
    host: list[HostEvent] = []
    launches: dict[int, HostEvent] = {}
    on_device: list[dict] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        category, arguments = event.get("cat"), event.get("args", {})
        if category in HOST:
            host.append(_host_event(event, arguments))
            if "correlation" in arguments:
                launches[arguments["correlation"]] = host[-1]
        elif category in DEVICE:
            on_device.append(event)
    host = _linked(host)
    device = [
        DeviceEvent(e["name"], e["ts"], e["ts"] + e.get("dur", 0), launches.get(e.get("args", {}).get("correlation")))
        for e in sorted(on_device, key=lambda e: e["ts"])
    ]
    return Trace(host, device)


def _host_event(event: dict, arguments: dict) -> HostEvent:
    sequence = arguments.get("Sequence number")
    return HostEvent(
        name=event["name"],
        category=event["cat"],
        thread=event["tid"],
        start=event["ts"],
        end=event["ts"] + event.get("dur", 0),
        sequence=sequence if sequence is not None and sequence >= 0 else None,
        forward_thread=arguments.get("Fwd thread id", 0),
    )


def _linked(events: list[HostEvent]) -> list[HostEvent]:
    """Set parents and children by nesting in time on each thread."""
    by_thread: dict[int, list[HostEvent]] = defaultdict(list)
    for event in events:
        by_thread[event.thread].append(event)
    ordered = []
    for of_thread in by_thread.values():
        of_thread.sort(key=lambda event: (event.start, -event.end))
        around: list[HostEvent] = []
        for event in of_thread:
            while around and event.start >= around[-1].end:
                around.pop()
            if around:
                event.parent = around[-1]
                around[-1].children.append(event)
            around.append(event)
        ordered += of_thread
    return ordered
