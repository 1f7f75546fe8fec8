"""Interleaving order, warm-up, and summaries of samples."""

import time

import pytest
import torch

from tools.benchmarks.timing import Spread, elapsed, interleave, ratio

CPU = torch.device("cpu")


def test_alternatives_run_in_turn_and_in_both_orders():
    calls: list[str] = []
    interleave(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        CPU,
        warmup=1,
        repetitions=2,
        before_each=lambda: calls.append("|"),
        after_repetition=lambda: calls.append("."),
    )
    assert "".join(calls) == "|a|b.|b|a.|a|b."


def test_warmup_is_not_kept_and_the_callbacks_are_not_timed():
    samples = interleave(
        {"a": lambda: None},
        CPU,
        warmup=2,
        repetitions=3,
        before_each=lambda: time.sleep(0.02),
        after_repetition=lambda: time.sleep(0.02),
    )
    assert len(samples["a"]) == 3
    assert min(samples["a"]) < 0.01


def test_elapsed_is_in_seconds():
    assert 0.02 <= elapsed(lambda: time.sleep(0.02), CPU) < 2


def test_spread_holds_median_and_quartiles():
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread(3.0, 2.0, 4.0).scaled(10) == Spread(30.0, 20.0, 40.0)


def test_ratio_pairs_the_times_of_a_repetition():
    assert ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]) == Spread(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])
