"""What one rank says of a hang: where it is, what it waits in, its threads' stacks; as text and for the merge."""

import os
import socket
import sys
import threading
import time
import traceback
from bisect import bisect_right
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from moe_framework.resilience.collectives import Collective, Group, process_groups, recorded
from moe_framework.resilience.marks import Exchange, Mark, MarkLog, Place

PACKAGE = "moe_framework"
NUM_MARKS_WRITTEN = 1024
NUM_MARKS_SHOWN = 24
NUM_COLLECTIVES_SHOWN = 10


# How the reason of a report begins where the rank was silent.
SILENT = "no progress"


@dataclass(frozen=True)
class ThreadStack:
    """One thread's Python stack.

    Attributes:
        name: The thread's name.
        ident: `threading.get_ident()`.
        frames: `file:line in function`, the outermost first.
    """

    name: str
    ident: int
    frames: list[str]

    @property
    def own_frame(self) -> str:
        """The innermost frame inside this package; empty if there is none."""
        return next((frame for frame in reversed(self.frames) if f"{PACKAGE}/" in frame), "")


@dataclass(frozen=True)
class RankReport:
    """A rank's state.

    Attributes:
        rank: The rank.
        world_size: Number of ranks.
        host: Its host.
        pid: Its process.
        reason: Why it reports.
        written_ns: `time.time_ns()` of this report.
        marks: Its last marks, the oldest first.
        mark_threads: Threads that made marks.
        groups: Its process groups.
        collectives: Its last collectives, the oldest first.
        note: Why there are no collectives; empty if there are.
        exchange: Its last dispatch that ended.
        stacks: Its threads' stacks, the main thread's first.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    reason: str
    written_ns: int
    marks: list[Mark]
    mark_threads: list[int]
    groups: list[Group]
    collectives: list[Collective]
    note: str
    exchange: Exchange | None
    stacks: list[ThreadStack]

    @property
    def is_of_hang(self) -> bool:
        """Whether the rank reports because it was silent, and not because a collective failed."""
        return self.reason.startswith(SILENT)

    @property
    def place(self) -> Place:
        """Where the rank is."""
        return self.marks[-1].place

    @property
    def waits_at(self) -> str:
        """The line of this package that the training thread is in."""
        return self.stacks[0].own_frame if self.stacks else ""

    def age_s(self, time_ns: int) -> float:
        """Return how long before the report a time was, in seconds."""
        return (self.written_ns - time_ns) / 1e9

    def unfinished(self) -> list[Collective]:
        """Return the collectives of training that have not ended; those of background threads are not among them."""
        return [one for one in self.collectives if not one.finished and one.thread in self.mark_threads]

    def place_of(self, collective: Collective) -> Place | None:
        """Return where the rank was when it began a collective; None if that is forgotten, or not of training."""
        index = bisect_right(self.marks, collective.begun_ns, key=lambda mark: mark.time_ns) - 1
        return self.marks[index].place if index >= 0 and collective.thread in self.mark_threads else None


def report_of(
    log: MarkLog, *, rank: int, world_size: int, reason: str, error: BaseException | None = None
) -> RankReport:
    """Describe this rank as it is now.

    Args:
        log: Its marks.
        rank: Its rank.
        world_size: Number of ranks.
        reason: Why it reports.
        error: What ended the main thread's work, if it did; its traceback then stands for the thread's stack.
    """
    collectives, note = recorded()
    return RankReport(
        rank=rank,
        world_size=world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        reason=reason,
        written_ns=time.time_ns(),
        marks=log.marks()[-NUM_MARKS_WRITTEN:],
        mark_threads=sorted(log.threads),
        groups=process_groups(),
        # Earlier ones may be of groups that are gone, whose names are used again.
        collectives=[one for one in collectives if one.begun_ns >= log.begun_ns],
        note=note,
        exchange=log.last_exchange(),
        stacks=stacks_of_threads(error),
    )


def stacks_of_threads(error: BaseException | None = None) -> list[ThreadStack]:
    """Return the stacks of all threads that run Python, but the caller's; the main thread's first.

    Args:
        error: Whose traceback stands for the main thread's stack.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident or 0, threading.get_ident()
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != own}
    stacks = [
        ThreadStack(names.get(ident, f"thread {ident}, not started by Python"), ident, _callers(frame))
        for ident, frame in sorted(frames.items(), key=lambda item: item[0] != main)
    ]
    if error is None:
        return stacks
    raised = [_line(frame, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    return [ThreadStack(f"traceback of {type(error).__name__}", main, raised), *stacks]


def _callers(frame: FrameType | None) -> list[str]:
    frames = []
    while frame is not None:
        frames.append(_line(frame, frame.f_lineno))
        frame = frame.f_back
    return frames[::-1]


def _line(frame: FrameType, number: int) -> str:
    # Without the source's text: reading it could wait for the file system that the rank hangs in.
    return f"{frame.f_code.co_filename}:{number} in {frame.f_code.co_qualname}"


def to_json(report: RankReport) -> dict[str, Any]:
    """Return a report as JSON values."""
    return asdict(report)


def from_json(values: dict[str, Any]) -> RankReport:
    """Return the report that `to_json` made JSON of.

    Raises:
        ValueError, TypeError, LookupError: The values are not such a report.
    """
    exchange = values["exchange"]
    return RankReport(
        **values
        | {
            "marks": [Mark(time_ns, Place(*place)) for time_ns, place in values["marks"]],
            "groups": [Group(**one) for one in values["groups"]],
            "collectives": [Collective(**one) for one in values["collectives"]],
            "exchange": None if exchange is None else Exchange(Place(*exchange[0]), *exchange[1:]),
            "stacks": [ThreadStack(**one) for one in values["stacks"]],
        }
    )


def to_text(report: RankReport) -> str:
    """Return a report as `rank_N.txt` shows it."""
    sections = [
        ("where it is", [str(report.place), *_exchange_lines(report.exchange)]),
        ("collectives that it has begun and not finished", _collective_lines(report, finished=False)),
        (f"its last {NUM_COLLECTIVES_SHOWN} finished collectives", _collective_lines(report, finished=True)),
        ("its last marks, with their age", _mark_lines(report)),
        ("stacks of its threads, innermost call last", _stack_lines(report)),
    ]
    text = f"rank {report.rank} of {report.world_size}, host {report.host}, process {report.pid}, "
    text += f"{timestamp(report.written_ns)}\n{report.reason}\n"
    for title, lines in sections:
        text += f"\n{title}:\n" + "".join(f"  {line}\n" for line in lines or ["none"])
    return text


def timestamp(time_ns: int) -> str:
    """Return a time as ISO 8601 in UTC."""
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="seconds")


def _exchange_lines(exchange: Exchange | None) -> list[str]:
    if exchange is None:
        return []
    return [
        f"last dispatch that ended: {exchange.place}",
        f"  token copies sent to each expert rank: {exchange.sent}",
        f"  token copies received from each:       {exchange.received}",
    ]


def _collective_lines(report: RankReport, *, finished: bool) -> list[str]:
    if report.note:
        return [report.note]
    groups = {group.name: group for group in report.groups}
    chosen = [one for one in report.collectives if one.finished == finished]
    lines = []
    for one in chosen[-NUM_COLLECTIVES_SHOWN:] if finished else chosen:
        group = groups.get(one.group)
        of = f"group {one.group}" if group is None else f"{group.description} (ranks {ranges(group.ranks)})"
        place = report.place_of(one) or "in the background, or before the marks below"
        lines.append(f"{report.age_s(one.begun_ns):8.1f} s ago: {one.describe()} of {of}; {place}")
    return lines


def _mark_lines(report: RankReport) -> list[str]:
    return [f"{report.age_s(mark.time_ns):10.3f} s  {mark.place}" for mark in report.marks[-NUM_MARKS_SHOWN:]]


def _stack_lines(report: RankReport) -> list[str]:
    lines = []
    for stack in report.stacks:
        lines += [stack.name, *(f"  {frame}" for frame in stack.frames)]
    return lines


def ranges(ranks: list[int]) -> str:
    """Return ranks in short, such as `0-3, 7`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
