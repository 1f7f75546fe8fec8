"""The loss of a checkpoint is what training wrote, at every layout and from every format; errors end all ranks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moe_framework.checkpoint.manifest import read_manifest
from tests.distributed import train_jobs
from tests.distributed.evaluate_jobs import evaluated, unreadable, watched
from tests.helpers.pool import RankPool
from tests.helpers.tiny_runs import arguments, metrics, write_genome
from tests.unit.checkpoint.convert.folders import run as convert

TOLERANCE = 1e-6
# Seven held-out rows: no layout's batches come out even.
NUM_BASES = 4000
LAYOUTS = {
    "dp2": (2, ("parallel.ep=1",)),
    "ep2": (2, ("parallel.ep=2",)),
    "tp2": (2, ("parallel.ep=1", "parallel.tp=2")),
    "ep2_tp2": (4, ("parallel.ep=2", "parallel.tp=2", "parallel.expert_tp=2", "train.micro_batch_size=2")),
}


@dataclass(frozen=True)
class Trained:
    """A short run.

    Attributes:
        folder: Holds its data and the run.
        ranks: The pool.
    """

    folder: Path
    ranks: RankPool

    @property
    def checkpoints(self) -> Path:
        return self.folder / "run" / "checkpoints"

    def line(self, checkpoint: Path, *changes: str) -> list[str]:
        """The command line of an evaluation; what only training takes is there as well, as in a run's own YAML."""
        own = [word for word in arguments(self.folder) if not word.startswith("data.path=")]
        return [*own[:2], str(checkpoint), *own[2:], f"data.path={self.folder / 'genome.fa'}", *changes]

    def report(self, checkpoint: Path, *changes: str, world_size: int = 1) -> dict[str, Any]:
        """Evaluate and return what is written."""
        file = self.folder / "report.json"
        file.unlink(missing_ok=True)
        ended = self.ranks.run(evaluated, world_size, [*self.line(checkpoint, *changes), "--json", str(file)])
        assert [one.code for one in ended] == [0] * world_size, ended[0].text
        return json.loads(file.read_text())


def train(ranks: RankPool, folder: Path, *changes: str) -> Trained:
    write_genome(folder / "genome.fa", num_bases=NUM_BASES)
    common = ("parallel.ep=1", "eval.every=2", "eval.max_rows=3", "checkpoint.keep=0")
    line = arguments(folder, *common, *changes, max_steps=4, every=2)
    (ended,) = ranks.run(train_jobs.command, 1, line)
    assert ended.code == 0, ended.text
    return Trained(folder, ranks)


def summary(trained: Trained) -> dict[str, Any]:
    return json.loads((trained.folder / "run" / "summary.json").read_text())


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(ranks, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def on_one_rank(trained: Trained) -> dict[str, Any]:
    return trained.report(trained.checkpoints, "parallel.ep=1")


def test_the_loss_and_the_baselines_are_those_that_training_wrote(trained: Trained, on_one_rank: dict[str, Any]):
    wrote = summary(trained)
    assert on_one_rank["loss"] == pytest.approx(wrote["heldout_loss"], rel=TOLERANCE)
    assert on_one_rank["baselines"] == {name: wrote[name] for name in on_one_rank["baselines"]}
    assert set(on_one_rank["baselines"]) == {"uniform_loss", "markov1_loss", "markov3_loss", "markov_best_loss"}
    # Of the held-out bases all but the first, which follows the cut.
    assert on_one_rank["targets"] == NUM_BASES // 10 - 1
    assert on_one_rank["rows"] == 7
    assert on_one_rank["checkpoint"].endswith("step_00000004")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in ("ep2", "tp2") else pytest.mark.slow) for name in LAYOUTS]
)
def test_every_layout_measures_what_one_rank_does(trained: Trained, on_one_rank: dict[str, Any], layout: str):
    world_size, degrees = LAYOUTS[layout]
    found = trained.report(trained.checkpoints, *degrees, world_size=world_size)
    assert found["loss"] == pytest.approx(on_one_rank["loss"], rel=TOLERANCE)
    for name in ("targets", "tokens", "rows", "accuracy", "max_over_mean_load", "experts_never_used", "baselines"):
        assert found[name] == on_one_rank[name], name


def test_the_rows_of_a_limited_evaluation_are_those_of_training(trained: Trained):
    (line,) = [line for line in metrics(trained.folder / "run") if line.get("heldout_loss")]
    found = trained.report(trained.checkpoints / "step_00000002", "parallel.ep=2", "eval.max_rows=3", world_size=2)
    assert found["rows"] == 3
    assert found["loss"] == pytest.approx(line["heldout_loss"], rel=1e-5)  # six digits are written


def test_weights_of_hugging_face_have_the_loss_of_the_step_that_they_come_from(
    trained: Trained, on_one_rank: dict[str, Any], tmp_path: Path
):
    convert(trained.checkpoints / "step_00000004", tmp_path / "hf", "hf")
    found = trained.report(tmp_path / "hf", "parallel.ep=2", world_size=2)
    assert found["loss"] == pytest.approx(on_one_rank["loss"], rel=TOLERANCE)
    assert found["checkpoint"] == str(tmp_path / "hf")


def test_of_a_test_set_every_base_counts_and_rows_trained_on_are_told(trained: Trained, tmp_path: Path):
    other = write_genome(tmp_path / "other.fa", num_bases=500, seed=1)
    found = trained.report(trained.checkpoints, "parallel.ep=2", f"data.path={other}", "--split", "all", world_size=2)
    assert found["targets"] == 500
    assert found["baselines"].keys() == {"uniform_loss"}
    warned = {}
    for path in (other, trained.folder / "genome.fa"):
        line = trained.line(trained.checkpoints, "parallel.ep=1", f"data.path={path}", "--split", "all")
        (ended,) = trained.ranks.run(evaluated, 1, line)
        warned[path.name] = "TRAINED ON A PART OF THESE ROWS" in ended.text
    assert warned == {"other.fa": False, "genome.fa": True}


def test_a_larger_held_out_part_than_at_training_is_told(trained: Trained):
    for fraction, expected in ((0.1, False), (0.05, False), (0.2, True)):
        line = trained.line(trained.checkpoints, "parallel.ep=1", f"data.heldout_fraction={fraction}")
        (ended,) = trained.ranks.run(evaluated, 1, line)
        assert ended.code == 0
        assert ("TRAINED ON A PART OF THESE ROWS; it was 0.1 then" in ended.text) == expected


def test_a_blends_data_sets_have_their_own_losses_and_the_whole_is_trainings(ranks: RankPool, tmp_path: Path):
    other = write_genome(tmp_path / "other.fa", num_bases=2500, seed=1)
    blend = f"data.path=0.7 {tmp_path / 'genome.fa'} 0.3 {other}"
    trained = train(ranks, tmp_path, blend)
    found = trained.report(trained.checkpoints, "parallel.ep=2", blend, world_size=2)
    assert found["loss"] == pytest.approx(summary(trained)["heldout_loss"], rel=TOLERANCE)
    assert [source["path"] for source in found["sources"]] == [str(tmp_path / "genome.fa"), str(other)]
    for source in found["sources"]:
        alone = trained.report(trained.checkpoints, "parallel.ep=1", f"data.path={source['path']}")
        assert source["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE)
        assert [source[name] for name in ("targets", "rows", "accuracy")] == [
            alone[name] for name in ("targets", "rows", "accuracy")
        ]
    # With few rows they are spread over all data sets, as training's evaluation spreads them.
    limited = trained.report(trained.checkpoints / "step_00000002", "parallel.ep=1", blend, "eval.max_rows=3")
    assert [source["rows"] for source in limited["sources"]] == [2, 1]
    (line,) = [line for line in metrics(trained.folder / "run") if line.get("heldout_loss")]
    assert limited["loss"] == pytest.approx(line["heldout_loss"], rel=1e-5)


def test_there_is_no_optimizer_and_no_gradient_each_row_is_read_once_and_the_backend_is_the_runs(trained: Trained):
    found = trained.ranks.run(watched, 2, trained.line(trained.checkpoints, "parallel.ep=2"))
    assert [one.ended.code for one in found] == [0, 0], found[0].ended.text
    assert [one.num_gradients for one in found] == [0, 0]
    saved = read_manifest(trained.checkpoints / "step_00000004").state["experts_backend"]
    assert [one.preferred for one in found] == [saved, saved]
    assert sorted(row for one in found for row in one.rows) == list(range(7))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("model.num_layers=3",), "model.num_layers=3: {checkpoint} has 2. Set model.num_layers=2."),
        (("data.path=/nowhere.fa",), "data.path=/nowhere.fa"),
        (("--json", "/nowhere/x.json"), "--json=/nowhere/x.json must be a file in a folder that exists"),
        (("model.top_k=9",), "model.top_k=9"),
    ],
)
def test_what_cannot_be_evaluated_ends_every_rank_and_is_said_once(trained: Trained, changes: tuple, message: str):
    ended = trained.ranks.run(evaluated, 2, trained.line(trained.checkpoints, "parallel.ep=2", *changes))
    assert [one.code for one in ended] == [2, 2]
    assert message.format(checkpoint=trained.checkpoints / "step_00000004") in ended[0].text
    assert "Error" not in ended[1].text
    assert "Traceback" not in ended[0].text


@pytest.mark.parametrize("name", ["missing", "empty", "file", "incomplete"])
def test_a_bad_checkpoint_is_said_before_the_data_is_read(trained: Trained, tmp_path: Path, name: str):
    path = tmp_path / name
    if name == "file":
        path.write_text("x")
    elif name != "missing":
        path.mkdir()
    if name == "incomplete":
        (path / "step_00000001").mkdir()
    ended = trained.ranks.run(evaluated, 2, trained.line(path, "parallel.ep=2", "data.path=/nowhere.fa"))
    assert [one.code for one in ended] == [2, 2]
    assert ended[0].text.startswith(f"CheckpointError: {path}: ")
    assert ended[0].text.rstrip().endswith(("Give the folder of a checkpoint.", "of a complete checkpoint."))
    assert ended[1].text == ""


def test_a_rank_that_cannot_read_a_row_ends_all(trained: Trained):
    ended = trained.ranks.run(
        unreadable, 2, trained.line(trained.checkpoints, "parallel.ep=2"), on_rank=1, after=2, timeout_s=60
    )
    assert [one.code for one in ended] == [2, 2]
    assert "DataError: data.path=/x: row cannot be read. Mend the file." in ended[0].text
