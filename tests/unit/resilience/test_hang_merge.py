"""What the reports of ranks say together."""

import pytest

from moe_framework.resilience.hang_merge import diagnose, find_waits, odd_exchanges
from tests.unit.resilience.reports import EP01, EP23, SAVER, WORLD4, place, report

DISPATCH, EXPERTS, NEXT_BLOCK = place("dispatch"), place("experts"), place("block", 2)


def test_a_rank_that_left_a_place_without_the_collective_there_is_the_suspect():
    waiting = report(0, [DISPATCH, (EP01, 5, "all_to_all", False)], groups=(WORLD4, EP01))
    went_on = report(1, [DISPATCH, EXPERTS, NEXT_BLOCK, (WORLD4, 9, "all_gather", False)], groups=(WORLD4, EP01))
    others = [
        report(
            rank,
            [DISPATCH, (EP23, 5, "all_to_all", True), EXPERTS, NEXT_BLOCK, (WORLD4, 9, "all_gather", False)],
            groups=(WORLD4, EP23),
        )
        for rank in (2, 3)
    ]
    found = diagnose(dict(enumerate([waiting, went_on, *others])), 4)
    assert found.headline == (
        "step 3, micro-batch 1, layer 1, forward, dispatch: rank 1 went past it without all_to_all #5 of mesh_ep, "
        "in which rank 0 waits."
    )
    assert (found.place, found.suspects, found.absent) == (DISPATCH, [1], [])
    assert [(wait.group.description, wait.waiting, wait.behind) for wait in found.waits] == [
        ("mesh_ep", [0], [1]),
        ("default_pg", [1, 2, 3], [0]),
    ]


def test_different_collectives_under_one_number_are_told_apart():
    first = report(0, [DISPATCH, (WORLD4, 5, "all_to_all", False, (2, 4), "Long")])
    others = [
        report(rank, [DISPATCH, EXPERTS, (WORLD4, 5, "all_to_all", False, (9, 32), "Float")]) for rank in (1, 2, 3)
    ]
    (wait,) = find_waits(dict(enumerate([first, *others])))
    assert [version.ranks for version in wait.versions] == [[0], [1, 2, 3]]
    assert diagnose(dict(enumerate([first, *others])), 4).suspects == [1, 2, 3]


def test_exchanges_of_different_numbers_of_rows_are_the_same_collective():
    both = {
        rank: report(rank, [DISPATCH, (EP01, 5, "all_to_all", False, (rank + 3, 32))], groups=(EP01,))
        for rank in (0, 1)
    }
    (wait,) = find_waits(both)
    assert len(wait.versions) == 1
    assert not wait.is_blocked
    assert "has not ended: the network between them, or a device." in diagnose(both, 2).headline


def test_a_rank_that_stays_in_a_layer_is_named_with_its_line():
    stays = report(2, [place("attention")], frame="/x/moe_framework/model/attention.py:7 in Attention.forward")
    others = {rank: report(rank, [place("router"), (WORLD4, 5, "all_gather", False)]) for rank in (0, 1, 3)}
    found = diagnose(others | {2: stays}, 4)
    assert found.headline == (
        "step 3, micro-batch 1, layer 1, forward, attention: rank 2 stays there, in no collective "
        "(moe_framework/model/attention.py:7 in Attention.forward); ranks 0-1, 3 wait in all_gather #5 of default_pg."
    )
    assert (found.place, found.suspects) == (place("attention"), [2])


def test_of_ranks_that_others_wait_for_the_one_that_waits_for_nobody_is_named():
    # 0 waits for 1 in their own group; 2 and 3 wait for both.
    reports = {
        0: report(0, [place("combine"), (EP01, 5, "all_to_all", False)], groups=(WORLD4, EP01)),
        1: report(1, [place("experts")], groups=(WORLD4, EP01)),
        2: report(2, [NEXT_BLOCK, (WORLD4, 9, "all_gather", False)]),
        3: report(3, [NEXT_BLOCK, (WORLD4, 9, "all_gather", False)]),
    }
    found = diagnose(reports, 4)
    assert found.suspects == [1]
    assert [(wait.waiting, wait.behind) for wait in found.waits] == [([0], [1]), ([2, 3], [0, 1])]


def test_a_rank_that_waits_itself_is_not_the_one_to_look_at():
    reports = {
        # Begun before the oldest mark, so that it is not known to be the earlier one.
        0: report(0, [(EP01, 5, "all_to_all", False), place("combine")], groups=(WORLD4, EP01)),
        1: report(1, [place("experts")], groups=(WORLD4, EP01)),
        2: report(2, [NEXT_BLOCK, (WORLD4, 9, "all_gather", False)]),
        3: report(3, [NEXT_BLOCK, (WORLD4, 9, "all_gather", False)]),
    }
    found = diagnose(reports, 4)
    assert (found.waits[0].behind, found.suspects) == ([0, 1], [1])


def test_a_rank_that_is_still_in_the_place_has_not_gone_past_it():
    reports = {
        0: report(0, [DISPATCH, (EP01, 5, "all_to_all", False)], groups=(EP01,)),
        1: report(1, [DISPATCH], groups=(EP01,)),
    }
    headline = diagnose(reports, 2).headline
    assert headline.startswith(
        "step 3, micro-batch 1, layer 1, forward, dispatch: rank 1 stays there, in no collective;"
    )


def test_a_rank_without_a_report_is_named_with_those_that_wait_for_it():
    reports = {rank: report(rank, [DISPATCH, (WORLD4, 5, "all_reduce", False)]) for rank in (0, 1, 3)}
    found = diagnose(reports, 4)
    assert (found.suspects, found.absent) == ([2], [2])
    assert found.headline.startswith(
        "rank 2 wrote no report: stopped, dead, or its interpreter is blocked; ranks 0-1, 3"
    )
    assert "wait in all_reduce #5 of default_pg" in found.headline
    (wait,) = found.waits
    assert (wait.absent, wait.behind, wait.passed) == ([2], [], [])


def test_a_rank_on_which_the_collective_has_ended_is_not_behind():
    reports = {
        0: report(0, [DISPATCH, (EP01, 5, "broadcast", False)], groups=(EP01,)),
        1: report(1, [DISPATCH, (EP01, 5, "broadcast", True), EXPERTS], groups=(EP01,)),
    }
    (wait,) = find_waits(reports)
    assert (wait.behind, wait.passed) == ([], [1])


def test_each_rank_waits_in_the_first_collective_that_has_not_ended():
    begun = [(WORLD4, number, "all_gather", False) for number in (5, 6, 7)]
    waits = find_waits({0: report(0, [DISPATCH, *begun]), 1: report(1, [DISPATCH, *begun[:1]])})
    assert [(wait.number, wait.waiting) for wait in waits] == [(5, [0, 1])]


def test_a_background_save_is_no_wait_of_training():
    save = (WORLD4, 5, "all_gather", False, (1,), "Byte", SAVER)
    assert find_waits({0: report(0, [DISPATCH, save]), 1: report(1, [NEXT_BLOCK])}) == []


def test_groups_of_other_ranks_with_the_same_name_are_other_groups():
    one, other = EP01, EP23.__class__("7", "mesh_ep", [2, 3])
    waits = find_waits(
        {
            0: report(0, [DISPATCH, (one, 5, "all_to_all", False)], groups=(one,)),
            2: report(2, [DISPATCH, (other, 5, "all_to_all", False)], groups=(other,)),
        }
    )
    assert [(wait.group.ranks, wait.waiting, wait.absent) for wait in waits] == [([0, 1], [0], [1]), ([2, 3], [2], [3])]


def test_without_recorded_collectives_the_rank_furthest_behind_is_named():
    note = "no collectives recorded"
    reports = {0: report(0, [NEXT_BLOCK], note=note), 1: report(1, [DISPATCH], note=note)}
    found = diagnose(reports, 2)
    assert found.headline == (
        "No rank waits in a collective. Rank 1 is the furthest behind: "
        "step 3, micro-batch 1, layer 1, forward, dispatch."
    )
    assert found.suspects == [1]


def _layers(numbers_of_collectives: list[int]) -> list:
    events, number = [], 0
    for layer, count in enumerate(numbers_of_collectives):
        events.append(place("dispatch", layer))
        for _ in range(count):
            number += 1
            events.append((WORLD4, number, "all_to_all", True))
        events.append(place("experts", layer))
    return events


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_dispatch_with_another_number_of_collectives_than_in_other_layers_is_odd(count: int):
    (odd,) = odd_exchanges(report(1, _layers([3, 3, count, 3])))
    assert (odd.rank, odd.place, odd.begun, odd.usual) == (1, place("dispatch", 2), count, 3)


def test_a_dispatch_that_has_not_ended_is_not_odd():
    assert odd_exchanges(report(1, _layers([3, 3, 3, 1])[:-1])) == []


def test_without_a_majority_nothing_is_odd():
    assert odd_exchanges(report(1, _layers([3, 3, 0]))) == []  # the first may have begun before the recorded ones


def test_dispatches_before_the_oldest_recorded_collective_are_not_counted():
    assert odd_exchanges(report(1, _layers([0, 0, 3, 3, 3]))) == []


def test_an_odd_dispatch_explains_a_lost_rank():
    # What is left when a mismatch kills one of the two: the other one's report alone.
    alone = report(1, [*_layers([3, 3, 0, 3]), NEXT_BLOCK], world_size=2)
    found = diagnose({1: alone}, 2)
    assert found.headline.startswith("step 3, micro-batch 1, layer 2, forward, dispatch: rank 1 began 0 collectives")
    assert (found.suspects, found.absent) == ([1], [0])
