"""A run that was stopped and started again equals the run that was not."""

import json
from pathlib import Path

import pytest
import torch

from moe_framework.checkpoint import read_manifest
from moe_framework.data.sources import Cut, open_data
from moe_framework.optim.schedule import Schedule, learning_rate
from tests.distributed import train_jobs as jobs
from tests.helpers.pool import RankPool
from tests.helpers.tiny_runs import arguments, losses, metrics, step_numbers, write_genome

EP2, DP2, ONE = ("parallel.ep=2",), ("parallel.ep=1", "train.micro_batch_size=2"), ("parallel.ep=1",)
# Accumulation, recomputation and a foreground save: what else could change the order of sums.
EP2_ACCUMULATED = (*EP2, "train.activation_checkpointing=selective", "checkpoint.async_save=false")
DP2_TP2 = (
    "parallel.ep=1",
    "parallel.tp=2",
    "parallel.dp_replicate=2",
    "train.activation_checkpointing=selective",
    "experts.backend=loop",
)
DP2_EP2 = ("parallel.ep=2", "train.activation_checkpointing=full", "moe.aux_loss=global_batch")


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory) -> tuple[Path, list[jobs.Seen]]:
    """The uninterrupted run on two ranks, with every checkpoint kept."""
    folder = tmp_path_factory.mktemp("whole")
    seen = ranks.run(jobs.watch, 2, arguments(folder, *EP2, "checkpoint.keep=0"))
    assert [one.ended for one in seen if one.ended and one.ended.code != 0] == []
    return folder, seen


def rows_by_step(seen: list[jobs.Seen]) -> dict[int, dict[int, str]]:
    """The global batch of each step: the digest of each sample, over all ranks."""
    merged: dict[int, dict[int, str]] = {}
    for one in seen:
        for step, rows in one.rows.items():
            assert not merged.setdefault(step, {}).keys() & rows.keys(), "a sample on two ranks"
            merged[step].update(rows)
    return merged


def exact(run_dir: Path) -> list[dict]:
    """Everything in metrics.jsonl that doesn't measure time or memory."""
    measured = ("tokens_per_second", "mfu", "peak_memory_bytes", "save_stall_ms")
    return [{key: value for key, value in line.items() if key not in measured} for line in metrics(run_dir)]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, EP2_ACCUMULATED),
        (2, DP2),
        pytest.param(4, DP2_EP2, marks=pytest.mark.slow),
        pytest.param(4, DP2_TP2, marks=pytest.mark.slow),
    ],
    ids=["ep2", "dp2", "dp2_ep2", "dp2_tp2"],
)
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(ranks: RankPool, tmp_path, world_size, layout):
    reference, stopped = tmp_path / "reference", tmp_path / "stopped"
    reference.mkdir()
    stopped.mkdir()
    expected = ranks.run(jobs.watch, world_size, arguments(reference, *layout, max_steps=8))
    cut = ranks.run(jobs.watch, world_size, arguments(stopped, *layout, max_steps=8), stop_after=5)
    assert list(losses(stopped / "run")) == [1, 2, 3, 4, 5]
    resumed = ranks.run(jobs.watch, world_size, arguments(stopped, *layout, max_steps=8))
    assert all(one.start == (3, 12) for one in resumed)
    assert exact(stopped / "run") == exact(reference / "run")
    for before, after, straight in zip(cut, resumed, expected, strict=True):
        assert {**before.rows, **after.rows} == straight.rows
        assert {**before.digests, **after.digests} == straight.digests
    assert len(set(losses(stopped / "run").values())) == 8
    assert (
        json.loads((stopped / "run" / "summary.json").read_text())["heldout_loss"]
        == (json.loads((reference / "run" / "summary.json").read_text())["heldout_loss"])
    )


def test_other_layouts_go_on_with_the_same_batches_and_losses(ranks: RankPool, whole, tmp_path):
    folder, expected = whole
    rows = {}
    for world_size, layout, stop in ((2, EP2, 4), (2, DP2, 8), (1, ONE, None)):
        seen = ranks.run(jobs.watch, world_size, arguments(tmp_path, *layout), stop_after=stop)
        rows.update(rows_by_step(seen))
    assert rows == rows_by_step(expected)
    assert losses(tmp_path / "run") == pytest.approx(losses(folder / "run"), rel=1e-5)
    layouts = [read_manifest(tmp_path / "run/checkpoints" / f"step_{step:08d}").state["layout"] for step in (9, 12)]
    assert [layout["world_size"] for layout in layouts] == [1, 1]


def test_epochs_pass_in_these_runs_and_each_has_its_own_order(whole):
    folder, seen = whole
    num_rows = len(open_data(str(folder / "genome.fa"), Cut(seq_length=64, heldout_fraction=0.1)).train)
    rows = [digest for _, step in sorted(rows_by_step(seen).items()) for _, digest in sorted(step.items())]
    assert len(rows) == 48 > 3 * num_rows
    epochs = [rows[start : start + num_rows] for start in (0, num_rows, 2 * num_rows)]
    assert all(len(set(epoch)) == num_rows for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_cut_during_a_background_save_does_not_lose_the_step(ranks: RankPool, tmp_path):
    ranks.run(jobs.watch, 2, arguments(tmp_path, *EP2), stop_after=6, wait_for_save=False)
    assert step_numbers(tmp_path / "run") == [3, 6]
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_00000006\n"


def test_each_rank_gets_its_own_random_state_back(ranks: RankPool, tmp_path):
    saved = ranks.run(jobs.draw_after_saving, 2, arguments(tmp_path, *EP2), step_number=3)
    resumed = ranks.run(jobs.draw_after_resuming, 2, arguments(tmp_path, *EP2))
    assert len(saved[0]) == 3
    assert resumed == saved
    assert not set(saved[0]) & set(saved[1])


def test_resume_from_a_named_step_repeats_what_came_after(ranks: RankPool, whole, tmp_path):
    folder, expected = whole
    step_dir = folder / "run/checkpoints/step_00000006"
    # In a run of its own, and with the saves of the first one untouched.
    changes = (*EP2, f"checkpoint.resume={step_dir}", f"data.path={folder / 'genome.fa'}")
    seen = ranks.run(jobs.watch, 2, arguments(tmp_path, *changes))
    assert all(one.start == (6, 24) for one in seen)
    assert losses(tmp_path / "run") == {step: loss for step, loss in losses(folder / "run").items() if step > 6}
    assert [one.digests[12] for one in seen] == [one.digests[12] for one in expected]
    assert step_numbers(tmp_path / "run") == [9, 12]
    assert step_numbers(folder / "run") == [3, 6, 9, 12]


def test_resume_from_a_folder_of_steps_is_from_one_step_on_every_rank(ranks: RankPool, whole, tmp_path):
    steps = whole[0] / "run/checkpoints"
    changes = (*EP2, f"checkpoint.resume={steps}", f"data.path={whole[0] / 'genome.fa'}")
    line = arguments(tmp_path, *changes, max_steps=13)
    started = ranks.run(jobs.start_while_another_run_saves, 2, line, steps / "step_00000003")
    assert [one[:2] for one in started] == [((12, 48), 12)] * 2
    assert f"checkpoint.resume={steps}: step_00000012 is the newest complete step there" in started[0][3]
    assert f"resumed from {steps / 'step_00000012'}" in started[0][3]


@pytest.mark.parametrize(
    "schedule", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("linear", "constant")), "wsd"]
)
def test_the_learning_rate_is_the_schedules_also_after_a_resume(ranks: RankPool, tmp_path, schedule: Schedule):
    decay_steps = 4 if schedule == "wsd" else 0
    changes = (*ONE, f"optim.schedule={schedule}", f"optim.decay_steps={decay_steps}", "checkpoint.async_save=false")
    line = arguments(tmp_path, *changes, max_steps=8)
    ranks.run(jobs.watch, 1, line, stop_after=6)
    (seen,) = ranks.run(jobs.watch, 1, line)
    assert seen.start == (6, 24)
    shape = {"warmup_steps": 2, "max_steps": 8, "schedule": schedule, "decay_steps": decay_steps}
    expected = [learning_rate(step, lr=3e-3, min_lr=3e-4, **shape) for step in range(8)]
    assert [line["lr"] for line in metrics(tmp_path / "run")] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_going_back_in_a_run_drops_the_lines_that_are_repeated(ranks: RankPool, tmp_path):
    ranks.run(jobs.watch, 2, arguments(tmp_path, *EP2, "checkpoint.keep=0"))
    first = losses(tmp_path / "run")
    back = f"checkpoint.resume={tmp_path / 'run/checkpoints/step_00000003'}"
    seen = ranks.run(jobs.watch, 2, arguments(tmp_path, *EP2, back), stop_after=7)
    assert seen[0].start == (3, 12)
    assert losses(tmp_path / "run") == {step: loss for step, loss in first.items() if step <= 7}
    # The newest is what was saved last, not the highest number.
    assert ranks.run(jobs.watch, 2, arguments(tmp_path, *EP2), stop_after=7)[0].start == (6, 24)


def test_a_finished_run_started_again_changes_nothing_but_the_summary(ranks: RankPool, tmp_path):
    ranks.run(jobs.watch, 1, arguments(tmp_path, *ONE))
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    (seen,) = ranks.run(jobs.watch, 1, arguments(tmp_path, *ONE))
    assert seen.start == (12, 48)
    assert seen.rows == {}
    assert "train.max_steps=12: the run is at step 12 already" in seen.ended.text
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    assert step_numbers(tmp_path / "run") == [9, 12]


def test_init_from_takes_the_weights_alone(ranks: RankPool, whole, tmp_path):
    folder, _ = whole
    step_dir = folder / "run/checkpoints/step_00000012"
    other = write_genome(tmp_path / "other.fa", seed=1)  # new data, for a fine-tuning
    changes = (*EP2, f"data.path={other}", "train.seed=7", f"checkpoint.init_from={step_dir}")
    resumed = ranks.run(jobs.start_only, 2, arguments(folder, *EP2))
    started = ranks.run(jobs.start_only, 2, arguments(tmp_path, *changes))
    assert resumed[0][:2] == ((12, 48), 12)
    for position, optimizer_steps, parameters, _ in started:
        assert (position, optimizer_steps) == ((0, 0), 0)
        assert parameters.keys() == resumed[0][2].keys()
        assert all(torch.equal(parameters[name], resumed[0][2][name]) for name in parameters)
    assert f"initial weights from {step_dir}" in started[0][3]
    # Its own checkpoints come first from then on.
    ranks.run(jobs.watch, 2, arguments(tmp_path, *changes), stop_after=4)
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]
    assert ranks.run(jobs.start_only, 2, arguments(tmp_path, *changes))[0][0] == (3, 12)


def test_initial_weights_are_of_one_step_on_every_rank(ranks: RankPool, whole, tmp_path):
    steps = whole[0] / "run/checkpoints"
    line = arguments(tmp_path, *EP2, f"checkpoint.init_from={steps}")
    started = ranks.run(jobs.start_while_another_run_saves, 2, line, steps / "step_00000003")
    expected = ranks.run(jobs.start_only, 2, arguments(whole[0], *EP2))[0][2]
    for _, _, parameters, _ in started:
        assert all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())
    assert f"initial weights from {steps / 'step_00000012'}" in started[0][3]


def test_the_expert_backend_is_kept_in_the_checkpoint_for_the_resumed_run(whole):
    folder, _ = whole
    state = read_manifest(folder / "run/checkpoints/step_00000012").state
    assert state["experts_backend"] == "grouped_mm"
