"""From the ranks' reports of a hang: which ranks wait for which, and where their ways part. Pure functions."""

from collections import Counter
from dataclasses import dataclass

from moe_framework.resilience.collectives import Collective, Group
from moe_framework.resilience.hang_report import RankReport, ranges
from moe_framework.resilience.marks import Place

# The forward pass only: in backward, a layer's last mark stands for what the ranks do after it too.
_EXCHANGES = {(phase, activity) for phase in ("forward", "recomputation") for activity in ("dispatch", "combine")}


@dataclass(frozen=True)
class Version:
    """A collective that some ranks wait in, as these ranks began it.

    Attributes:
        collective: That of the first of them.
        ranks: The ranks.
        age_s: Seconds since the first of them began it.
        place: Where they began it; None if that is forgotten.
    """

    collective: Collective
    ranks: list[int]
    age_s: float
    place: Place | None


@dataclass(frozen=True)
class Wait:
    """The collective number `number` of a group, which has not ended on some ranks.

    Attributes:
        group: The group.
        number: The collective.
        versions: What is waited in; more than one if the ranks began different collectives under this number.
        behind: Members that have not begun it.
        absent: Members without a report.
        passed: Members on which it has ended.
    """

    group: Group
    number: int
    versions: list[Version]
    behind: list[int]
    absent: list[int]
    passed: list[int]

    @property
    def waiting(self) -> list[int]:
        """The ranks that wait."""
        return sorted(rank for version in self.versions for rank in version.ranks)

    @property
    def is_blocked(self) -> bool:
        """Whether it is known who keeps it from ending."""
        return bool(self.behind or self.absent or len(self.versions) > 1)

    @property
    def name(self) -> str:
        """The collective, as text."""
        return f"{self.versions[0].collective.kind} #{self.number} of {self.group.description}"


@dataclass(frozen=True)
class OddExchange:
    """A dispatch or combine in which a rank began another number of collectives than in its other layers.

    Attributes:
        rank: The rank.
        place: Where.
        begun: Collectives that it began there.
        usual: Collectives that it begins in most layers.
    """

    rank: int
    place: Place
    begun: int
    usual: int


@dataclass(frozen=True)
class Diagnosis:
    """What the reports say together.

    Attributes:
        headline: What happened, or what is known of it.
        place: Where it began; None if unknown.
        suspects: Ranks to look at first.
        waits: Who waits for whom, the earliest place first.
        odd: Exchanges that some rank left out or added.
        absent: Ranks without a report.
    """

    headline: str
    place: Place | None
    suspects: list[int]
    waits: list[Wait]
    odd: list[OddExchange]
    absent: list[int]


def diagnose(reports: dict[int, RankReport], world_size: int) -> Diagnosis:
    """Find out which ranks wait for which, and where their ways part.

    Args:
        reports: By rank; at least one.
        world_size: Number of ranks.
    """
    waits = sorted(find_waits(reports), key=_wait_order)
    odd = [one for rank in sorted(reports) for one in odd_exchanges(reports[rank])]
    absent = [rank for rank in range(world_size) if rank not in reports]
    headline, place, suspects = _headline(reports, waits, odd, absent)
    return Diagnosis(headline, place, suspects, waits, odd, absent)


def find_waits(reports: dict[int, RankReport]) -> list[Wait]:
    """Return each group's collectives that some rank waits in: of each rank, the first that has not ended."""
    groups: dict[tuple, Group] = {}
    firsts: dict[tuple, dict[int, Collective]] = {}
    for rank, report in reports.items():
        own, seen = {group.name: group for group in report.groups}, set()
        for one in report.unfinished():
            if one.group not in own or (one.backend, one.group) in seen:
                continue
            seen.add((one.backend, one.group))
            # Groups of other ranks may have the same name.
            key = (one.backend, one.group, tuple(own[one.group].ranks), one.number)
            groups[key] = own[one.group]
            firsts.setdefault(key, {})[rank] = one
    return [_wait(reports, groups[key], waiting) for key, waiting in firsts.items()]


def _wait(reports: dict[int, RankReport], group: Group, waiting: dict[int, Collective]) -> Wait:
    versions: dict[tuple, list[int]] = {}
    for rank, one in sorted(waiting.items()):
        versions.setdefault(one.signature(), []).append(rank)
    example = next(iter(waiting.values()))
    others = [rank for rank in group.ranks if rank not in waiting]
    last_begun = {rank: _last_begun(reports[rank], example) for rank in others if rank in reports}
    return Wait(
        group=group,
        number=example.number,
        versions=[_version(reports, waiting, ranks) for ranks in versions.values()],
        behind=[rank for rank, last in last_begun.items() if last < example.number],
        absent=[rank for rank in others if rank not in reports],
        passed=[rank for rank, last in last_begun.items() if last >= example.number],
    )


def _version(reports: dict[int, RankReport], waiting: dict[int, Collective], ranks: list[int]) -> Version:
    first = ranks[0]
    age_s = max(reports[rank].age_s(waiting[rank].begun_ns) for rank in ranks)
    return Version(waiting[first], ranks, age_s, reports[first].place_of(waiting[first]))


def _last_begun(report: RankReport, like: Collective) -> int:
    same = [one.number for one in report.collectives if (one.backend, one.group) == (like.backend, like.group)]
    return max(same, default=0)


def _wait_order(wait: Wait) -> tuple:
    places = [version.place.order() for version in wait.versions if version.place is not None]
    return (not wait.is_blocked, not places, min(places, default=()), wait.group.name, wait.number)


def odd_exchanges(report: RankReport) -> list[OddExchange]:
    """Return the dispatches and combines that began another number of collectives than most layers' do."""
    oldest_ns = report.collectives[0].begun_ns if report.collectives else report.written_ns
    begun = Counter(report.place_of(one) for one in report.collectives)
    counts: dict[tuple[str, str], dict[Place, int]] = {}
    # Without the last mark, whose activity has not ended.
    for time_ns, place in report.marks[:-1]:
        if (place.phase, place.activity) in _EXCHANGES and time_ns > oldest_ns:
            counts.setdefault((place.phase, place.activity), {})[place] = begun[place]
    found = []
    for of_place in counts.values():
        usual, frequency = Counter(of_place.values()).most_common(1)[0]
        if frequency > len(of_place) / 2:
            found += [OddExchange(report.rank, place, n, usual) for place, n in of_place.items() if n != usual]
    return found


def _headline(
    reports: dict[int, RankReport], waits: list[Wait], odd: list[OddExchange], absent: list[int]
) -> tuple[str, Place | None, list[int]]:
    blocked = [wait for wait in waits if wait.is_blocked]
    for wait in blocked:
        if found := _went_past(reports, wait):
            return found
    if odd:
        first = min(odd, key=lambda one: one.place.order())
        return (
            f"{first.place}: rank {first.rank} began {first.begun} collectives there, and {first.usual} in the same "
            "place of its other layers or steps.",
            first.place,
            [first.rank],
        )
    if blocked:
        return _not_there(reports, blocked[0])
    if absent:
        return f"{_ranks(absent)} wrote no report; no collective is known to wait for them.", None, absent
    if waits:
        wait = waits[0]
        begun = f"All of {_ranks(wait.group.ranks)} have begun {wait.name}, and it has not ended"
        return f"{begun}: the network between them, or a device.", wait.versions[0].place, wait.waiting
    last = min(reports.values(), key=lambda report: report.place.order())
    at = f" ({short(last.waits_at)})" if last.waits_at else ""
    return (
        f"No rank waits in a collective. Rank {last.rank} is the furthest behind: {last.place}{at}.",
        last.place,
        [last.rank],
    )


def _went_past(reports: dict[int, RankReport], wait: Wait) -> tuple[str, Place, list[int]] | None:
    """Say so if a rank has left the place where others wait in a collective, without having begun it."""
    placed = [version for version in wait.versions if version.place is not None]
    if not placed:
        return None
    first = min(placed, key=lambda version: version.place.order())  # pyright: ignore[reportOptionalMemberAccess]
    place = first.place
    assert place is not None
    others = [rank for version in wait.versions if version is not first for rank in version.ranks]
    past = [rank for rank in sorted(wait.behind + others) if _left(reports[rank], place)]
    if not past:
        return None
    text = f"{place}: {_ranks(past)} went past it without {first.collective.kind} #{wait.number} of "
    text += f"{wait.group.description}, in which {_ranks(first.ranks)} {_verb(first.ranks, 'wait')}."
    return text, place, past


def _left(report: RankReport, place: Place) -> bool:
    places = [mark.place for mark in report.marks]
    return place in places and places[-1] != place


def _not_there(reports: dict[int, RankReport], wait: Wait) -> tuple[str, Place | None, list[int]]:
    waiting = f"{_ranks(wait.waiting)} {_verb(wait.waiting, 'wait')} in {wait.name}"
    at = wait.versions[0].place
    if len(wait.versions) > 1:
        texts = [f"{_ranks(one.ranks)}: {one.collective.describe()}" for one in wait.versions]
        return f"{at}: the ranks began different collectives: {'; '.join(texts)}.", at, wait.waiting
    if wait.behind:
        # Of those that others wait for, the ones that wait for nobody.
        busy = [rank for rank in wait.behind if not reports[rank].unfinished()] or wait.behind
        report = reports[busy[0]]
        line = f" ({short(report.waits_at)})" if report.waits_at else ""
        what = "in no collective" if not report.unfinished() else f"in {report.unfinished()[0].describe()}"
        text = f"{report.place}: {_ranks(busy)} {_verb(busy, 'stay')} there, {what}{line}; {waiting}."
        return text, report.place, busy
    text = f"{_ranks(wait.absent)} wrote no report: stopped, dead, or its interpreter is blocked; {waiting} ({at})."
    return text, at, wait.absent


def short(frame: str) -> str:
    """Return a stack frame with its path from the package on."""
    start = frame.rfind("moe_framework/")
    return frame[max(start, 0) :]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def _verb(ranks: list[int], verb: str) -> str:
    return verb if len(ranks) > 1 else f"{verb}s"
