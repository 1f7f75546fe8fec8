"""A run that cannot go on stops on every rank with the same error, and what it saved is whole."""

import math
from pathlib import Path

import pytest

from moe_framework.checkpoint import read_manifest
from tests.distributed import train_jobs as jobs
from tests.helpers.pool import RankPool
from tests.helpers.tiny_runs import arguments, content, losses, metrics, step_numbers

# A stop that takes longer than this counts as a hang.
TIMEOUT_S = 60
EP2 = "parallel.ep=2"


@pytest.mark.parametrize("error", [StopIteration, pytest.param(EOFError, marks=pytest.mark.slow)])
def test_one_ranks_data_ending_early_stops_all_and_keeps_the_checkpoints(ranks: RankPool, tmp_path: Path, error):
    start = arguments(tmp_path, EP2)
    ended = ranks.run(jobs.data_ends_early, 2, start, on_rank=1, at_step=5, error=error, timeout_s=TIMEOUT_S)
    assert [one.code for one in ended] == [2, 2]
    # The first micro-batches of step 5 hold the samples 16 and 17.
    early = f"\nDataError: data.path={tmp_path / 'genome.fa'}: data ended early, at samples 17 to 17"
    assert ended[0].text.count(early) == 1
    assert "of data rank 1. Give every rank the same complete file." in ended[0].text
    assert "DataError" not in ended[1].text
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]
    assert step_numbers(tmp_path / "run") == [3]
    # With the whole file, the run goes on from there.
    (resumed, _) = ranks.run(jobs.watch, 2, start)
    assert resumed.start == (3, 12)
    assert list(losses(tmp_path / "run")) == list(range(1, 13))


def test_errors_that_differ_between_ranks_are_said_by_each(ranks: RankPool, tmp_path: Path):
    ended = ranks.run(jobs.refuses, 2, arguments(tmp_path, EP2), ["one error", "another one"], timeout_s=TIMEOUT_S)
    assert [one.code for one in ended] == [2, 2]
    assert "\nDataError: one error\n" in ended[0].text
    assert ended[1].text.endswith("[rank 1] DataError: another one\n")


def test_an_error_of_one_rank_is_said_by_it(ranks: RankPool, tmp_path: Path):
    ended = ranks.run(jobs.refuses, 2, arguments(tmp_path, EP2), [None, "only here"], timeout_s=TIMEOUT_S)
    assert [one.code for one in ended] == [None, 2]
    assert ended[1].text.endswith("[rank 1] DataError: only here\n")
    assert "DataError" not in ended[0].text


def test_a_single_non_finite_step_is_skipped_and_counted(ranks: RankPool, tmp_path: Path):
    seen = ranks.run(jobs.diverge, 2, arguments(tmp_path, EP2), bad_steps=[5], on_rank=1)
    assert [one.ended.code for one in seen] == [0, 0]
    for one in seen:
        assert one.digests[5] == one.digests[4]
        assert len(set(one.digests.values())) == 11
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["step"] for line in lines if line.get("skipped")] == [5]
    assert lines[4]["loss"] is None
    assert lines[4]["grad_norm"] is None
    assert all(math.isfinite(line["loss"]) for line in lines if line["step"] != 5)
    # The data went on, the optimizer did not.
    state = read_manifest(tmp_path / "run/checkpoints/step_00000012").state
    assert state["position"] == {"step": 12, "consumed_samples": 48}
    assert state["optimizer_step"] == 11


def test_too_many_non_finite_steps_stop_every_rank_and_leave_the_last_good_checkpoint(ranks: RankPool, tmp_path: Path):
    start = arguments(tmp_path, EP2, "checkpoint.resume=never", "train.max_nonfinite_steps=3")
    bad = list(range(5, 13))
    seen = ranks.run(jobs.diverge, 2, start, bad_steps=bad, on_rank=0, timeout_s=TIMEOUT_S)
    assert "TrainingError" not in seen[1].ended.text
    assert (
        "\nTrainingError: loss=nan, grad_norm=nan at step 7: not finite for 3 steps in a row "
        "(train.max_nonfinite_steps=3)."
    ) in seen[0].ended.text
    assert "the last checkpoint is step_00000003. Lower optim.lr or look at the data." in seen[0].ended.text
    for one in seen:
        assert one.ended.code == 2
        assert one.digests[4] == one.digests[5] == one.digests[6] == one.digests[7]
        assert one.digests[4] != one.digests[3]
    # Step 6 was due, but the run was not sound then.
    assert step_numbers(tmp_path / "run") == [3]
    before = content(tmp_path / "run/checkpoints")
    position, optimizer_steps, _, _ = ranks.run(jobs.start_only, 2, arguments(tmp_path, EP2))[0]
    assert (position, optimizer_steps) == ((3, 12), 3)
    assert content(tmp_path / "run/checkpoints") == before


def test_finite_steps_in_between_start_the_count_again(ranks: RankPool, tmp_path: Path):
    start = arguments(tmp_path, "parallel.ep=1", "train.max_nonfinite_steps=2")
    (seen,) = ranks.run(jobs.diverge, 1, start, bad_steps=[2, 4, 6, 8], on_rank=0)
    assert seen.ended.code == 0
    (seen,) = ranks.run(jobs.diverge, 1, [*start, "run.name=other"], bad_steps=[2, 3], on_rank=0)
    assert seen.ended.code == 2


def test_a_save_in_the_background_is_completed_when_the_run_stops(ranks: RankPool, tmp_path: Path):
    start = arguments(tmp_path, EP2, "train.max_nonfinite_steps=1")
    seen = ranks.run(jobs.diverge, 2, start, bad_steps=[4], on_rank=0, timeout_s=TIMEOUT_S)
    assert [one.ended.code for one in seen] == [2, 2]
    assert step_numbers(tmp_path / "run") == [3]
    assert ranks.run(jobs.start_only, 2, arguments(tmp_path, EP2))[0][0] == (3, 12)


def test_the_last_step_is_saved_also_if_it_was_skipped(ranks: RankPool, tmp_path: Path):
    (seen,) = ranks.run(jobs.diverge, 1, arguments(tmp_path, "parallel.ep=1"), bad_steps=[12], on_rank=0)
    assert seen.ended.code == 0
    assert step_numbers(tmp_path / "run") == [9, 12]


def test_a_step_that_fails_start_after_start_is_refused_with_its_batch(ranks: RankPool, tmp_path: Path):
    start = arguments(tmp_path, "parallel.ep=1", "resilience.max_failures_per_step=2")
    for _ in range(2):
        (failed,) = ranks.run(jobs.fails, 1, start, in_step=5)
        assert failed.code == 1
        assert "rank 0 failed:\nTraceback" in failed.text
        assert failed.text.count("ValueError: a bad batch") == 1
    before = content(tmp_path / "run")
    (refused,) = ranks.run(jobs.command, 1, start)
    assert refused.code == 2
    # Four rows a step: step 5 has the samples 16 to 19.
    assert "the last 2 starts all died in step 5, whose batch is samples 16 to 19." in refused.text
    assert "Last error: rank 0: ValueError: a bad batch." in refused.text
    assert content(tmp_path / "run") == before
    # Another configuration is another attempt.
    (ended,) = ranks.run(jobs.command, 1, [*start, "optim.lr=1e-3"])
    assert ended.code == 0
