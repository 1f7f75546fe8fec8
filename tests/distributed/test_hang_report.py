"""What the reports say of real hangs, and that watching changes nothing."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed import hang_jobs as jobs
from tests.distributed.parity_jobs import Layout, Spec
from tests.helpers.pool import RankPool, RanksFailedError

SPEC = Spec(seed=3, changes=(("num_layers", 3),))
EP2, EP2_DP2 = Layout(1, 2), Layout(2, 2)
AT_DISPATCH = "step 2, micro-batch 1, layer 1, forward, dispatch"


def test_a_dispatch_that_one_rank_skips_is_named_with_layer_and_rank(ranks: RankPool, tmp_path: Path):
    folder = tmp_path / "hang"
    errors = ranks.run(jobs.broken, 2, SPEC, EP2, folder, jobs.skips_the_dispatch_of_layer_1, 1)
    # The first whose time is over closes its connections, which may end the other before its own time is over.
    assert all(errors)
    assert any("Timed out" in error for error in errors)
    page = (folder / "report.txt").read_text()
    number = _number_of(page, rf"  {AT_DISPATCH}: rank 1 went past it without all_to_all #(\d+) of default_pg")
    assert f"#{number} of default_pg, in which rank 0 waits.\n  Look first at rank_1.txt." in page
    # With two ranks the expert-parallel group is the world, so that both wait under the same number.
    assert re.search(rf"0 in #{number} all_to_all Long \[2, 4\] for \d\.\d s \({AT_DISPATCH}\)", page)
    assert re.search(rf"; 1 in #{number} all_gather Float .* \(step 2, micro-batch 1, layer 2, forward, block\)", page)
    assert f"rank 1: {AT_DISPATCH}: 0, not 3" in page
    summary = json.loads((folder / "report.json").read_text())
    assert summary["suspects"] == [1]
    assert summary["place"]["layer"] == 1
    assert summary["place"]["activity"] == "dispatch"
    assert summary["absent"] == []


def test_a_ranks_own_report_shows_where_it_is_and_what_it_waits_in(ranks: RankPool, tmp_path: Path):
    folder = tmp_path / "hang"
    ranks.run(jobs.broken, 2, SPEC, EP2, folder, jobs.blocks_in_attention_of_layer_1, 1)
    waiting, blocked = (_reports(folder, f"rank_{rank}.txt") for rank in range(2))
    assert "where it is:\n  step 2, micro-batch 1, layer 1, forward, router\n" in waiting
    assert re.search(
        r"not finished:\n +\d\.\d s ago: #\d+ all_gather Float \[\d+\] → \[2, \d+\] of default_pg", waiting
    )
    assert "where it is:\n  step 2, micro-batch 1, layer 1, forward, attention\n" in blocked
    assert "not finished:\n  none\n" in blocked
    assert "innermost call last:\n  MainThread\n" in blocked
    assert re.search(r"hang_jobs\.py:\d+ in _wait_for_page\n", blocked)
    sent, received = (
        [re.findall(rf"{word}[^:]*: +\[(\d+), (\d+)\]", text)[0] for text in (waiting, blocked)]
        for word in ("copies sent", "copies received")
    )
    assert [sent[0][1], sent[1][0]] == [received[1][0], received[0][1]]
    page = _reports(folder, "report.txt")
    assert "layer 1, forward, attention: rank 1 stays there, in no collective" in page
    assert "; rank 0 waits in all_gather #" in page


@pytest.mark.slow
def test_the_page_says_which_of_four_ranks_wait_for_which(ranks: RankPool, tmp_path: Path):
    folder = tmp_path / "hang"
    ranks.run(jobs.broken, 4, SPEC, EP2_DP2, folder, jobs.blocks_in_backward_of_layer_2, 2)
    page = _reports(folder, "report.txt")
    assert re.search(r"layer 2, backward, block: rank 2 stays there, in no collective", page)
    # Its partner in the exchange waits for it, and the ranks that share parameters wait for both or for one.
    assert re.search(
        r"mesh_ep \(ranks 2-3\): 3 in #\d+ all_to_all .* layer 2, backward, combine\); not begun by 2\n", page
    )
    assert not re.search(r"mesh_ep \(ranks 0-1\)", page.partition("Where the ranks are")[0])
    waits = re.findall(r"not begun by ([\d, -]+)\n", page)
    assert all("2" in behind or "3" in behind for behind in waits)


def _reports(folder: Path, name: str) -> str:
    """A report of ranks that went on: set aside, unless the run ended before that was seen."""
    (path,) = folder.rglob(name)
    return path.read_text()


def _number_of(page: str, pattern: str) -> int:
    found = re.search(pattern, page)
    assert found, page
    return int(found[1])


WATCHED_LAYOUTS = (
    replace(EP2, accumulation=2),
    replace(EP2, checkpointing="full"),
    pytest.param(replace(EP2_DP2, checkpointing="selective"), marks=pytest.mark.slow),
    pytest.param(Layout(1, 2, tp=2), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("layout", WATCHED_LAYOUTS, ids=str)
def test_watching_changes_no_number(ranks: RankPool, tmp_path: Path, layout: Layout):
    spec = replace(SPEC, changes=())
    folder = tmp_path / "hang"
    watched, plain = (
        ranks.run(jobs.steps, layout.world_size, spec, layout, folder, watched=watched) for watched in (True, False)
    )
    _assert_equal(watched, plain)
    for run in watched:
        _assert_marks_are_those_of_a_step(run.places, layout, num_layers=2)


def test_the_ranks_end_with_the_exit_code_of_a_hang(ranks: RankPool, tmp_path: Path):
    folder = tmp_path / "hang"
    with pytest.raises(RanksFailedError, match="died with exit code 76"):
        ranks.run(
            jobs.broken, 4, SPEC, EP2_DP2, folder, jobs.skips_the_dispatch_of_layer_1, 1, abort=True, timeout_s=60
        )
    page = (folder / "report.txt").read_text()
    assert f"{AT_DISPATCH}: rank 1 went past it without all_to_all #" in page
    assert "of mesh_ep, in which rank 0 waits." in page
    assert re.search(rf"mesh_ep \(ranks 0-1\): 0 in #\d+ all_to_all .* \({AT_DISPATCH}\); not begun by 1\n", page)
    assert re.search(r"default_pg \(ranks 0-3\): 1 in #\d+ all_gather .*; not begun by 0, 2-3\n", page)


@pytest.mark.slow
def test_watching_compiled_blocks_changes_no_number_and_no_graph(ranks: RankPool, tmp_path: Path):
    layout = replace(EP2, compiled=True, checkpointing="full")
    plain, watched = (
        ranks.run(jobs.steps, 2, SPEC, layout, tmp_path / "hang", watched=watched, timeout_s=280)
        for watched in (False, True)
    )
    _assert_equal(watched, plain)
    assert plain[0].num_graphs > 0
    assert [run.num_graphs for run in watched] == [run.num_graphs for run in plain]


def _assert_equal(watched: list[jobs.Run], plain: list[jobs.Run]) -> None:
    for one, other in zip(watched, plain, strict=True):
        assert one.losses == other.losses
        assert one.heldout == other.heldout
        assert all(torch.equal(one.parameters[name], value) for name, value in other.parameters.items())


def _assert_marks_are_those_of_a_step(places: list[str], layout: Layout, *, num_layers: int) -> None:
    def of(micro_batch: int, layer: int, phase: str) -> list[str]:
        start = f"step 2, micro-batch {micro_batch}, layer {layer}, {phase}, "
        return [place.removeprefix(start) for place in places if place.startswith(start)]

    activities = ["block", "attention", "router", "dispatch", "experts", "combine", "balancing", "end of block"]
    for micro_batch in range(1, layout.accumulation + 1):
        for layer in range(num_layers):
            assert of(micro_batch, layer, "forward") == activities
            assert of(micro_batch, layer, "backward") == ["block", "combine", "experts", "dispatch"]
            again = of(micro_batch, layer, "recomputation")
            assert again[:3] == ([] if layout.checkpointing == "none" else ["attention", "router", "dispatch"])
    assert f"step 2, micro-batch {layout.accumulation + 1}" not in "\n".join(places)
