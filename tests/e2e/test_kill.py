"""`kill -9` of a rank during a save in the background: the same command goes on as if nothing had happened."""

import json
import random
from pathlib import Path

import pytest

from tests.distributed import train_jobs as jobs
from tests.helpers.kills import Kill, run_with_kills, table
from tests.helpers.pool import RankPool
from tests.helpers.tiny_runs import arguments, losses, metrics, step_numbers

# Wider experts than other tiny runs have, so that a save takes a while.
EP2 = ("parallel.ep=2", "model.intermediate_size=256", "train.log_every=10")
EVERY = 2


def killed_run_equals_the_whole_one(ranks: RankPool, folder: Path, *, num_kills: int) -> None:
    # A start that is killed gets at most three saves further.
    size = {"max_steps": EVERY * (3 * num_kills + 3), "every": EVERY}
    seed = random.SystemRandom().randrange(2**31)
    whole, killed = folder / "whole", folder / "killed"
    whole.mkdir()
    killed.mkdir()
    # The whole run waits for its saves: a busy machine is no reason to leave some out, of which three end a run.
    line = arguments(whole, *EP2, "checkpoint.async_save=false", **size)
    ended = ranks.run(jobs.command, 2, line, timeout_s=240)
    assert [one.code for one in ended] == [0, 0], ended
    kills = run_with_kills(arguments(killed, *EP2, **size), killed / "run", num_ranks=2, num_kills=num_kills, seed=seed)
    print(f"\nseed {seed}\n{table(kills)}")
    assert [kill.resumed for kill in kills] == [complete_step_after(kill) for kill in kills]
    expected = losses(whole / "run")
    assert list(expected) == list(range(1, size["max_steps"] + 1))
    assert losses(killed / "run") == expected
    assert [line["grad_norm"] for line in metrics(killed / "run")] == [
        line["grad_norm"] for line in metrics(whole / "run")
    ]
    assert step_numbers(killed / "run") == step_numbers(whole / "run")
    summaries = [json.loads((run / "run/summary.json").read_text())["heldout_loss"] for run in (whole, killed)]
    assert summaries[0] == summaries[1]


def complete_step_after(kill: Kill) -> int:
    """The step being saved if it was published in spite of the kill, otherwise the one before."""
    return kill.saving if kill.published else kill.saving - EVERY


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_twenty_times_the_run_equals_the_whole_one(ranks: RankPool, tmp_path: Path):
    killed_run_equals_the_whole_one(ranks, tmp_path, num_kills=20)
