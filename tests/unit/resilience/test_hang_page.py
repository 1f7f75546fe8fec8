"""The merged page."""

from dataclasses import replace

from moe_framework.resilience.collectives import Group
from moe_framework.resilience.hang_merge import diagnose
from moe_framework.resilience.hang_page import page
from moe_framework.resilience.marks import Exchange
from tests.unit.resilience.reports import EP01, WORLD4, place, report


def _page(reports: dict, world_size: int = 4) -> str:
    return page(reports, diagnose(reports, world_size), written_by=min(reports), world_size=world_size)


def test_the_page_says_what_happened_who_waits_and_where_the_ranks_are():
    waiting = report(
        0,
        [place("dispatch"), (EP01, 5, "all_to_all", False)],
        groups=(WORLD4, EP01),
        frame="/a/moe_framework/distributed/collectives.py:47 in _exchange",
    )
    waiting = replace(waiting, exchange=Exchange(place("dispatch", 0), [3, 4], [5, 6]))
    stays = report(1, [place("attention")], groups=(WORLD4, EP01))
    lines = _page({0: waiting, 1: stays}).splitlines()
    assert lines[0] == (
        "Hang report of 2 of 4 ranks, 2023-11-14T22:13:20+00:00, written by rank 0: no progress for 5.0 s"
    )
    assert lines[lines.index("What happened") + 2] == "  Look first at rank_1.txt."
    assert lines[lines.index("Who waits for whom, the earliest first") + 1] == (
        "  mesh_ep (ranks 0-1): 0 in #5 all_to_all Float [4, 8] for 5.0 s "
        "(step 3, micro-batch 1, layer 1, forward, dispatch); not begun by 1"
    )
    start = lines.index("Where the ranks are") + 1
    assert lines[start : start + 3] == [
        "  2-3: no report: stopped, dead, or its interpreter is blocked",
        "  0: step 3, micro-batch 1, layer 1, forward, dispatch; in #5 all_to_all of mesh_ep; "
        "moe_framework/distributed/collectives.py:47 in _exchange",
        "  1: step 3, micro-batch 1, layer 1, forward, attention; in no collective",
    ]
    assert "  rank 0: step 3, micro-batch 1, layer 0, forward, dispatch: sent [3, 4], received [5, 6]" in lines


def test_a_thousand_ranks_make_one_page():
    world = Group("0", "default_pg", list(range(1000)))
    pairs = [Group(str(first), "mesh_ep", [first, first + 1]) for first in range(0, 1000, 2)]
    reports = {
        rank: report(
            rank,
            [place("dispatch", rank % 40), (pairs[rank // 2], 5, "all_to_all", False)],
            groups=(world, pairs[rank // 2]),
            world_size=1000,
        )
        for rank in range(1000)
        if rank % 3
    }
    text = _page(reports, 1000)
    assert len(text.splitlines()) < 70
    assert "… and" in text
    # All ranks in the same place are one line.
    assert "  0-999: step" in _page(
        {
            rank: report(rank, [place("router"), (world, 5, "all_gather", False)], groups=(world,))
            for rank in range(1000)
        },
        1000,
    )


def test_the_page_says_why_there_are_no_collectives():
    text = _page({0: report(0, [place("router")], note="no collectives recorded: …")}, 1)
    assert "Why there are no collectives\n  no collectives recorded: …\n" in text
