"""Timing of a contender: slow steps take longer, failures become rows, and memory is given back."""

import gc
import time
import weakref

import pytest
import torch

from tests.helpers.one_rank import one_rank
from tools.benchmarks.train_step.contender import Contender, Facts
from tools.benchmarks.train_step.measure import Row, measure

CPU = torch.device("cpu")
FACTS = Facts("bf16", "fp32", True, "fp32", "", "")
STEP_S = 0.02


def measured(build, profile=None) -> Row:
    with one_rank():
        return measure(
            "x",
            build,
            CPU,
            warmup=1,
            repetitions=3,
            tokens_per_gpu=100,
            flops_per_token=7.0,
            profile=profile,
        )


def counting(losses: list[float]) -> Contender:
    remaining = iter(losses)

    def step() -> float:
        time.sleep(STEP_S)
        return next(remaining)

    return Contender(step, 42, FACTS)


def test_a_row_has_times_rates_and_the_losses_at_both_ends():
    row = measured(lambda: counting([4.0, 3.0, 2.0, 1.0]))
    assert row.error is None
    assert (row.first_loss, row.last_loss, row.num_parameters) == (4.0, 1.0, 42)
    assert len(row.step_seconds) == 3
    assert row.seconds is not None
    assert row.seconds.median >= STEP_S
    assert row.tokens_per_second_per_gpu == pytest.approx(100 / row.seconds.median)
    assert row.model_flops_per_second_per_gpu == pytest.approx(700 / row.seconds.median)


def test_a_contender_that_cannot_be_built_is_a_row_with_the_error():
    def build() -> Contender:
        raise ValueError("no\nsuch thing")

    row = measured(build)
    assert row.error == "ValueError: no such thing"
    assert row.seconds is None
    assert row.facts is None


def test_a_step_that_fails_keeps_the_facts():
    row = measured(lambda: counting([1.0]))
    assert row.error is not None
    assert row.error.startswith("StopIteration")
    assert row.facts == FACTS


def test_a_loss_that_is_not_finite_is_an_error():
    row = measured(lambda: counting([1.0, float("nan"), 2.0, float("nan")]))
    assert row.error == "loss is not finite: 1.0, then nan"


def test_profiling_comes_after_the_timed_steps():
    seen = []

    def profile(contender: Contender) -> str:
        seen.append(contender.step())
        return "found"

    assert measured(lambda: counting([1.0, 2.0, 3.0, 4.0, 5.0]), profile).breakdown == "found"
    assert seen == [5.0]


class Weight:
    pass


def test_nothing_keeps_a_contender_alive_after_its_row():
    kept: list[weakref.ref] = []

    def build() -> Contender:
        weight = Weight()
        kept.append(weakref.ref(weight))
        cycle = [weight]
        cycle.append(cycle)  # pyright: ignore[reportArgumentType]
        return Contender(lambda: float(len(cycle)), 1, FACTS)

    gc.disable()  # only an explicit collection may free the cycle
    try:
        measured(build)
        assert kept[0]() is None
    finally:
        gc.enable()
