import math
from itertools import pairwise

import pytest

from moe_framework.optim.schedule import learning_rate

PEAK, MINIMUM = 3e-4, 1e-5


def rates(*, warmup_steps: int, max_steps: int) -> list[float]:
    return [
        learning_rate(step, lr=PEAK, min_lr=MINIMUM, warmup_steps=warmup_steps, max_steps=max_steps)
        for step in range(max_steps)
    ]


@pytest.mark.parametrize(("warmup_steps", "max_steps"), [(10, 100), (1, 7), (0, 50), (30, 100)])
def test_rises_in_equal_steps_to_the_peak_then_falls_to_exactly_the_minimum(warmup_steps: int, max_steps: int):
    rising = rates(warmup_steps=warmup_steps, max_steps=max_steps)[:warmup_steps]
    falling = rates(warmup_steps=warmup_steps, max_steps=max_steps)[warmup_steps:]
    assert rising == pytest.approx([PEAK * (step + 1) / warmup_steps for step in range(warmup_steps)])
    assert falling[0] == PEAK
    assert falling[-1] == MINIMUM
    assert all(earlier > later for earlier, later in pairwise(falling))


def test_falls_as_a_cosine():
    falling = rates(warmup_steps=10, max_steps=111)[10:]
    expected = [MINIMUM + (PEAK - MINIMUM) * (1 + math.cos(math.pi * i / 100)) / 2 for i in range(101)]
    assert falling == pytest.approx(expected)


def test_the_first_step_moves():
    assert rates(warmup_steps=10, max_steps=100)[0] == pytest.approx(PEAK / 10)


@pytest.mark.parametrize("max_steps", [1, 2, 10])
def test_a_warmup_as_long_as_the_run_reaches_the_peak(max_steps: int):
    assert rates(warmup_steps=max_steps, max_steps=max_steps)[-1] == PEAK


def test_stays_at_the_minimum_after_the_end():
    assert learning_rate(500, lr=PEAK, min_lr=MINIMUM, warmup_steps=10, max_steps=100) == MINIMUM
