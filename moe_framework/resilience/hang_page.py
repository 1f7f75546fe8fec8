"""The page that says what a hang is: `report.txt`."""

from collections.abc import Iterable

from moe_framework.resilience.hang_merge import Diagnosis, Wait, short
from moe_framework.resilience.hang_report import RankReport, ranges, timestamp

NO_REPORT = "no report: stopped, dead, or its interpreter is blocked"
# What a page has room for; the ranks' own files have the rest.
MAX_LINES_OF_A_SECTION = 16
MAX_EXCHANGES = 8


def page(reports: dict[int, RankReport], diagnosis: Diagnosis, *, written_by: int, world_size: int) -> str:
    """Return the page.

    Args:
        reports: By rank.
        diagnosis: From `diagnose`.
        written_by: The rank that merged the reports.
        world_size: Number of ranks.
    """
    first = reports[written_by]
    suspects = [rank for rank in diagnosis.suspects if rank in reports]
    look = f"Look first at {', '.join(f'rank_{rank}.txt' for rank in suspects[:4])}." if suspects else ""
    sections = [
        ("What happened", [diagnosis.headline, *([look] if look else [])]),
        ("Who waits for whom, the earliest first", [_wait_line(wait) for wait in diagnosis.waits]),
        ("Where the ranks are", _place_lines(reports, diagnosis.absent)),
        (
            "Exchanges with another number of collectives than in most layers",
            [f"rank {one.rank}: {one.place}: {one.begun}, not {one.usual}" for one in diagnosis.odd],
        ),
        ("Token copies in the last dispatch that ended", _exchange_lines(reports, diagnosis)),
        ("Why there are no collectives", sorted({report.note for report in reports.values()} - {""})),
    ]
    text = f"Hang report of {len(reports)} of {world_size} ranks, {timestamp(first.written_ns)}, "
    text += f"written by rank {written_by}: {first.reason}\n"
    return text + "".join(f"\n{title}\n{_body(lines)}" for title, lines in sections if lines)


def _body(lines: list[str]) -> str:
    shown = lines[:MAX_LINES_OF_A_SECTION]
    if len(lines) > len(shown):
        shown.append(f"… and {len(lines) - len(shown)} more; see the ranks' own files")
    return "".join(f"  {line}\n" for line in shown)


def _wait_line(wait: Wait) -> str:
    members = f"{wait.group.description} (ranks {ranges(wait.group.ranks)})"
    parts = [
        f"{ranges(one.ranks)} in {one.collective.describe()} for {one.age_s:.1f} s"
        + (f" ({one.place})" if one.place else "")
        for one in wait.versions
    ]
    text = f"{members}: {'; '.join(parts)}"
    if wait.behind:
        text += f"; not begun by {ranges(wait.behind)}"
    if wait.absent:
        text += f"; no report from {ranges(wait.absent)}"
    if wait.passed:
        text += f"; ended on {ranges(wait.passed)}"
    return text if wait.is_blocked or wait.passed else f"{text}; all of its ranks have begun it"


def _place_lines(reports: dict[int, RankReport], absent: list[int]) -> list[str]:
    alike: dict[str, list[int]] = {}
    for rank in sorted(reports):
        alike.setdefault(_state(reports[rank]), []).append(rank)
    silent = [f"{ranges(absent)}: {NO_REPORT}"] if absent else []
    return silent + [f"{ranges(ranks)}: {state}" for state, ranks in alike.items()]


def _state(report: RankReport) -> str:
    names = {group.name: group.description for group in report.groups}
    waits = [f"#{one.number} {one.kind} of {names.get(one.group, one.group)}" for one in report.unfinished()[:2]]
    what = f"in {', '.join(waits)}" if waits else "in no collective"
    return f"{report.place}; {what}" + (f"; {short(report.waits_at)}" if report.waits_at else "")


def _exchange_lines(reports: dict[int, RankReport], diagnosis: Diagnosis) -> list[str]:
    """Of the ranks that the first wait is about, because a page has no room for all."""
    ranks: Iterable[int] = diagnosis.waits[0].group.ranks if diagnosis.waits else sorted(reports)
    known = [(rank, reports[rank].exchange) for rank in ranks if rank in reports]
    return [
        f"rank {rank}: {exchange.place}: sent {exchange.sent}, received {exchange.received}"
        for rank, exchange in known[:MAX_EXCHANGES]
        if exchange is not None
    ]
