import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_framework.config.schema import Config, EvalConfig
from moe_framework.observe.metrics import write_json_atomic
from moe_framework.train.evaluate import Measured
from moe_framework.train.evaluation import Evaluation, Source
from tools.evaluation.report import report_of, to_text

LOADS = torch.tensor([[3, 1, 0, 0], [1, 1, 1, 1]])
A = Source("/a", 2, Measured(6.0, 3, 4, LOADS, torch.ones(2)), 1)
B = Source("/b", 5, Measured(4.0, 7, 8, LOADS * 2, torch.ones(2)), 4)
ALL_ROWS = replace(Config(), eval=EvalConfig(max_rows=0))
EMPTY = Source("/c", 1, Measured(0.0, 0, 1, None, None), 0)


def evaluation(*sources: Source, **baselines: float) -> Evaluation:
    return Evaluation(Path("/ckpt/step_00000009"), sources, baselines, "loop", 2.0)


def test_the_whole_is_the_mean_over_targets_and_each_data_set_has_its_own():
    report = report_of(evaluation(A, B), ALL_ROWS, "heldout")
    assert (report["loss"], report["targets"], report["rows"], report["tokens"]) == (1.0, 10, 7, 12)
    assert report["perplexity"] == pytest.approx(math.e)
    assert report["bits_per_target"] == pytest.approx(1 / math.log(2))
    assert report["accuracy"] == 0.5
    assert [source["loss"] for source in report["sources"]] == [2.0, 4 / 7]
    assert report["max_over_mean_load"] == [3.0, 1.0]
    assert report["experts_never_used"] == [[2, 3], []]
    assert report["tokens_per_second"] == 6.0


def test_the_text_has_every_figure():
    text = to_text(report_of(evaluation(A, B, uniform_loss=1.5, markov_best_loss=1.25), ALL_ROWS, "heldout"))
    for expected in (
        "/ckpt/step_00000009",
        "the demo genome (held out: the last 5.00%)",
        "1.000000 nats per target",
        "1.442695 bits per target",
        "2.7183",
        "50.00% of the targets",
        "1.500000 nats: guessing",
        "1.250000 nats: Markov, best of orders 0 to 8\n",
        "/b: loss 0.571429",
        "layer 0       3.000, 2 experts without a token",
        "6 tokens/s",
    ):
        assert expected in text


def test_a_lone_data_set_is_not_listed_again():
    assert "/a: loss" not in to_text(report_of(evaluation(A), ALL_ROWS, "heldout"))


def test_baselines_on_more_rows_than_were_chosen_say_so():
    limited = replace(ALL_ROWS, eval=EvalConfig(max_rows=3))
    text = to_text(report_of(evaluation(A, uniform_loss=1.5, markov1_loss=1.25), limited, "heldout"))
    assert "Markov, order 1 on all held-out targets" in text
    assert "guessing\n" in text
    assert "at most 3 rows" in text


def test_a_test_set_is_every_row():
    report = report_of(evaluation(A), ALL_ROWS, "all")
    assert report["heldout_fraction"] is None
    assert "(every row)" in to_text(report)


def test_a_data_set_without_a_target_has_no_loss(tmp_path: Path):
    report = report_of(evaluation(A, EMPTY), ALL_ROWS, "heldout")
    assert report["loss"] == 2.0
    assert "/c: no target in 1 rows" in to_text(report)
    write_json_atomic(tmp_path / "x.json", report)
    assert json.loads((tmp_path / "x.json").read_text())["sources"][1]["loss"] is None


def test_a_loss_too_large_for_a_perplexity_is_shown():
    report = report_of(evaluation(Source("/a", 1, Measured(1e4, 1, 1, LOADS, torch.ones(2)), 0)), ALL_ROWS, "all")
    assert report["perplexity"] == math.inf
    assert "10000.000000 nats" in to_text(report)
