"""A run logs the same numbers for the same global batches, whatever the layout, the accumulation and the resumes."""

from pathlib import Path

import pytest

from tests.distributed import train_jobs as jobs
from tests.helpers.pool import RankPool
from tests.helpers.tiny_runs import arguments, losses, metrics

MEASURED = ("tokens_per_second", "mfu", "peak_memory_bytes", "save_stall_ms")
TOLERANCE = 1e-5
NUM_STEPS = 3


def logged(ranks: RankPool, folder: Path, world_size: int, *changes: str) -> list[dict]:
    """Train a few steps from the same seed, and return what metrics.jsonl says about the steps."""
    folder.mkdir()
    common = ("moe.z_loss_coeff=1e-3", "model.vocab_size=11", "model.num_kv_heads=2", "experts.backend=loop")
    # Rows packed and padded; 8 a step, so that accumulation differs between the layouts.
    line = arguments(folder, *common, "train.global_batch_size=8", *changes, max_steps=NUM_STEPS, every=0)
    seen = ranks.run(jobs.watch, world_size, line)
    assert [one.ended.code for one in seen if one.ended is not None] == [0] * world_size, seen[0].ended
    lines = metrics(folder / "run")
    return [{name: value for name, value in step.items() if name not in MEASURED} for step in lines]


@pytest.fixture(scope="module")
def on_one_rank(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("one") / "run"
    return logged(ranks, folder, 1, "parallel.ep=1", "train.micro_batch_size=8")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(("parallel.ep=1", "parallel.tp=4", "train.micro_batch_size=2"), marks=pytest.mark.slow),
        ("parallel.ep=2", "parallel.tp=2", "parallel.expert_tp=2", "train.micro_batch_size=2"),
        ("parallel.ep=2", "parallel.dp_replicate=2", "train.micro_batch_size=1"),
        pytest.param(
            ("parallel.ep=1", "parallel.tp=2", "parallel.dp_replicate=2", "train.micro_batch_size=4"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_metrics_are_those_of_one_rank(ranks: RankPool, tmp_path: Path, on_one_rank: list[dict], changes: tuple):
    lines = logged(ranks, tmp_path / "other", 4, *changes)
    assert len(lines) == NUM_STEPS
    for line, expected in zip(lines, on_one_rank, strict=True):
        assert (
            line.keys()
            == expected.keys()
            >= {"loss", "aux_loss", "z_loss", "grad_norm", "max_over_mean_load", "tokens"}
        )
        assert line == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.slow
def test_a_run_that_changes_its_layout_goes_on_with_the_same_losses(ranks: RankPool, tmp_path: Path):
    one, changing = tmp_path / "one", tmp_path / "changing"
    one.mkdir()
    changing.mkdir()
    layouts = [
        (4, ("parallel.ep=2", "parallel.tp=2", "parallel.expert_tp=2"), 4),
        (4, ("parallel.ep=1", "parallel.tp=2", "parallel.dp_replicate=2"), 7),
        (2, ("parallel.ep=2",), None),
    ]
    ranks.run(jobs.watch, 1, arguments(one, "parallel.ep=1", "experts.backend=loop", max_steps=9))
    for world_size, layout, stop in layouts:
        line = arguments(changing, "experts.backend=loop", *layout, max_steps=9)
        seen = ranks.run(jobs.watch, world_size, line, stop_after=stop)
        # Ranks that share a row read the same one.
        tp = 2 if "parallel.tp=2" in layout else 1
        assert all(seen[rank].rows == seen[rank - rank % tp].rows for rank in range(world_size))
    assert losses(changing / "run") == pytest.approx(losses(one / "run"), rel=TOLERANCE)
