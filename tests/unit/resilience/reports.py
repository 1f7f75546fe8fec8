"""Hand-made reports of ranks."""

from typing import Any

from moe_framework.resilience.collectives import Collective, Group
from moe_framework.resilience.hang_report import RankReport, ThreadStack
from moe_framework.resilience.marks import TRAINING, Mark, Phase, Place

SECOND = 10**9
TRAINER, SAVER = 11, 22
WRITTEN_NS = 1_700_000_000 * SECOND

WORLD4 = Group("0", "default_pg", [0, 1, 2, 3])
EP01, EP23 = Group("7", "mesh_ep", [0, 1]), Group("8", "mesh_ep", [2, 3])


def place(activity: str, layer: int | None = 1, phase: Phase = "forward", **changes: Any) -> Place:
    """Make a place of step 3."""
    return Place(3, TRAINING, 1, phase, layer, activity)._replace(**changes)


def report(
    rank: int,
    events: list[Place | tuple],
    *,
    world_size: int = 4,
    groups: tuple[Group, ...] = (WORLD4,),
    frame: str = "",
    note: str = "",
    reason: str = "no progress for 5.0 s",
) -> RankReport:
    """Make a report from what a rank did, one event a second, the last of them five seconds ago.

    Args:
        rank: The rank.
        events: In order: places that it came to, and collectives as (group, number, kind, finished), after which
            the inputs' sizes, the inputs' types and the thread may follow.
        world_size: Number of ranks.
        groups: Its groups.
        frame: Where its main thread is.
        note: Why there are no collectives.
        reason: Why it reports.
    """
    marks, collectives = [], []
    for index, event in enumerate(events):
        time_ns = WRITTEN_NS - (5 + len(events) - 1 - index) * SECOND
        if isinstance(event, Place):
            marks.append(Mark(time_ns, event))
        else:
            collectives.append(collective(time_ns, *event))
    stacks = [ThreadStack("MainThread", TRAINER, [frame])] if frame else []
    return RankReport(
        rank=rank,
        world_size=world_size,
        host="host",
        pid=100 + rank,
        reason=reason,
        written_ns=WRITTEN_NS,
        marks=marks,
        mark_threads=[TRAINER],
        groups=list(groups),
        collectives=collectives,
        note=note,
        exchange=None,
        stacks=stacks,
    )


def collective(
    begun_ns: int,
    group: Group,
    number: int,
    kind: str,
    finished: bool,
    sizes: tuple[int, ...] = (4, 8),
    dtype: str = "Float",
    thread: int = TRAINER,
) -> Collective:
    """Make a collective of gloo's."""
    return Collective(
        "gloo", group.name, number, kind, [list(sizes)], [list(sizes)], [dtype], begun_ns, finished, thread
    )
