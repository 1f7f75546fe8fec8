import torch.distributed as dist

from moe_framework.distributed.collectives import raise_together, together
from moe_framework.errors import CheckpointError, ConfigError, DataError
from tests.helpers.pool import RankPool

ERRORS = {
    "config": ConfigError(["model.a=1: wrong.", "model.b=2: wrong too."]),
    "data": DataError("data.path=/x: missing."),
    "checkpoint": CheckpointError("step_00000200: damaged."),
    "bug": ValueError("not a user's mistake"),
}


def fail(names: tuple[str | None, ...]) -> str:
    """Fail with the error that this rank's name stands for, if it has one."""
    name = names[dist.get_rank()]
    raise_together(None if name is None else ERRORS[name])
    return "went on"


def fail_in_an_action(failed_rank: int, name: str = "data") -> str:
    """One rank's action fails; the others' succeed."""

    def action() -> str:
        if dist.get_rank() == failed_rank:
            raise ERRORS[name]
        return "went on"

    return together(action)


def fail_in_pairs(names: tuple[str | None, ...]) -> str:
    """The same within the groups (0, 1) and (2, 3)."""
    groups = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    group = groups[dist.get_rank() // 2]
    assert isinstance(group, dist.ProcessGroup)
    name = names[dist.get_rank()]
    raise_together(None if name is None else ERRORS[name], group)
    return "went on"


def test_nobody_raises_without_an_error(ranks: RankPool):
    assert ranks.run(fail, 3, (None, None, None)) == ["went on"] * 3


def test_every_rank_raises_the_named_error_of_the_one_that_failed(ranks: RankPool):
    for name in ("config", "data", "checkpoint"):
        names = [None, None, name]
        expected = (type(ERRORS[name]).__name__, str(ERRORS[name]))
        assert ranks.run_expecting_error(fail, 3, tuple(names)) == [expected] * 3


def test_the_lowest_failed_ranks_error_is_the_common_one(ranks: RankPool):
    errors = ranks.run_expecting_error(fail, 3, (None, "data", "checkpoint"))
    assert errors == [("DataError", "data.path=/x: missing.")] * 3


def test_a_bug_keeps_its_type_where_it_happened_and_names_the_rank_elsewhere(ranks: RankPool):
    elsewhere = ("RankError", "rank 1 failed: ValueError: not a user's mistake")
    errors = ranks.run_expecting_error(fail, 3, (None, "bug", None))
    assert errors == [elsewhere, ("ValueError", "not a user's mistake"), elsewhere]


def test_only_the_group_stops(ranks: RankPool):
    assert ranks.run_expecting_error(fail_in_pairs, 4, (None, None, "data", None)) == [
        None,
        None,
        ("DataError", "data.path=/x: missing."),
        ("DataError", "data.path=/x: missing."),
    ]


def test_one_rank_raises_its_own(ranks: RankPool):
    assert ranks.run_expecting_error(fail, 1, ("data",)) == [("DataError", "data.path=/x: missing.")]
    assert ranks.run(fail, 1, (None,)) == ["went on"]


def test_an_action_that_fails_on_one_rank_fails_on_every_rank(ranks: RankPool):
    assert ranks.run_expecting_error(fail_in_an_action, 2, 1) == [("DataError", str(ERRORS["data"]))] * 2
    assert ranks.run(fail_in_an_action, 2, 9) == ["went on"] * 2


def test_a_bug_in_an_action_stops_every_rank(ranks: RankPool):
    elsewhere = ("RankError", "rank 1 failed: ValueError: not a user's mistake")
    errors = ranks.run_expecting_error(fail_in_an_action, 2, 1, "bug")
    assert errors == [elsewhere, ("ValueError", "not a user's mistake")]
