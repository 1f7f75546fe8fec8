"""Training on token files: the same numbers at every layout, through resumes, and what a wrong vocabulary ends with."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.distributed import train_jobs as jobs
from tests.helpers.pool import RankPool
from tests.helpers.tiny_runs import arguments, losses
from tests.helpers.token_files import write_token_files

VOCAB = 50


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two corpora whose documents are shorter and longer than a row of 64."""
    folder, rng = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    for name, lengths in (("a", (10, 300, 40, 64, 500, 3, 200)), ("b", (900, 30, 30))):
        write_token_files(folder / name, [[rng.integers(0, VOCAB, length).tolist()] for length in lengths])
    return f"0.8 {folder}/a 0.2 {folder}/b"


def line(folder: Path, path: str, *changes: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    common = (
        f"model.vocab_size={VOCAB}",
        "experts.backend=loop",
        "data.reverse_complement=false",
        "data.heldout_fraction=0.2",
        f"data.path={path}",
    )
    return arguments(folder, *common, *changes)


def summary(folder: Path) -> dict:
    return json.loads((folder / "run/summary.json").read_text())


@pytest.mark.parametrize("separate", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_changes_its_layout_goes_on_with_the_same_rows_and_losses(
    ranks: RankPool, tmp_path: Path, blend: str, separate: bool
):
    documents = f"data.separate_documents={str(separate).lower()}"
    whole, changing = tmp_path / "whole", tmp_path / "changing"
    (expected,) = ranks.run(jobs.watch, 1, line(whole, blend, documents, "parallel.ep=1"))
    assert expected.ended is not None
    assert expected.ended.code == 0, expected.ended.text
    rows: dict[int, dict[int, str]] = {}
    for layout, stop in (("parallel.ep=2", 6), ("parallel.ep=1", None)):
        for seen in ranks.run(jobs.watch, 2, line(changing, blend, documents, layout), stop_after=stop):
            for step, of_rank in seen.rows.items():
                rows.setdefault(step, {}).update(of_rank)
    assert rows == expected.rows
    assert losses(changing / "run") == pytest.approx(losses(whole / "run"), rel=1e-5)
    assert summary(changing)["heldout_loss"] == pytest.approx(summary(whole)["heldout_loss"], rel=1e-5)
    assert summary(whole)["uniform_loss"] == pytest.approx(np.log(VOCAB))


def test_documents_that_are_kept_apart_give_other_losses_than_a_stream(ranks: RankPool, tmp_path: Path, blend: str):
    found = []
    for separate in ("true", "false"):
        changes = (
            f"data.separate_documents={separate}",
            "train.max_steps=1",
            "optim.warmup_steps=1",
            "checkpoint.every=0",
        )
        ranks.run(jobs.watch, 1, line(tmp_path / separate, blend, *changes, "parallel.ep=1"))
        found.append(losses(tmp_path / separate / "run")[1])
    assert found[0] != found[1]


def test_a_vocabulary_that_is_too_small_ends_every_rank_with_the_key(ranks: RankPool, tmp_path: Path, blend: str):
    ended = ranks.run(jobs.command, 2, line(tmp_path / "run", blend, "model.vocab_size=40"))
    assert [one.code for one in ended] == [2, 2]
    assert "is not in [0, model.vocab_size=40). Set model.vocab_size to that of the tokenizer" in ended[0].text
