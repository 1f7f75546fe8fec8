import math
from itertools import pairwise

import pytest

from moe_framework.optim.schedule import Schedule, learning_rate

PEAK, MINIMUM = 3e-4, 1e-5


def rates(*, warmup_steps: int, max_steps: int, schedule: Schedule = "cosine", decay_steps: int = 0) -> list[float]:
    shape = {"warmup_steps": warmup_steps, "schedule": schedule, "decay_steps": decay_steps}
    return [
        learning_rate(step, lr=PEAK, min_lr=MINIMUM, max_steps=max_steps, **shape)  # pyright: ignore[reportArgumentType]
        for step in range(max_steps)
    ]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize(("warmup_steps", "max_steps"), [(10, 100), (1, 7), (0, 50), (30, 100)])
def test_rises_in_equal_steps_to_the_peak_then_falls_to_exactly_the_minimum(
    warmup_steps: int, max_steps: int, schedule: Schedule
):
    rising = rates(warmup_steps=warmup_steps, max_steps=max_steps, schedule=schedule)[:warmup_steps]
    falling = rates(warmup_steps=warmup_steps, max_steps=max_steps, schedule=schedule)[warmup_steps:]
    assert rising == pytest.approx([PEAK * (step + 1) / warmup_steps for step in range(warmup_steps)])
    assert falling[0] == PEAK
    assert falling[-1] == MINIMUM
    assert all(earlier > later for earlier, later in pairwise(falling))


def test_falls_as_a_cosine():
    falling = rates(warmup_steps=10, max_steps=111)[10:]
    # Not approximately: a run of before there were other schedules goes on with the same bits.
    assert falling == [MINIMUM + 0.5 * (PEAK - MINIMUM) * (1.0 + math.cos(math.pi * (i / 100))) for i in range(101)]


def test_falls_in_equal_steps():
    falling = rates(warmup_steps=10, max_steps=111, schedule="linear")[10:]
    assert falling == pytest.approx([PEAK - (PEAK - MINIMUM) * i / 100 for i in range(101)])


@pytest.mark.parametrize("decay_steps", [0, 3])
def test_the_ends_of_a_line_are_exact(decay_steps: int):
    # Of these, the minimum plus the difference is not the peak.
    lr, min_lr = 1e-5, 8e-7
    schedule: Schedule = "wsd" if decay_steps else "linear"
    ends = [
        learning_rate(
            step, lr=lr, min_lr=min_lr, warmup_steps=2, max_steps=9, schedule=schedule, decay_steps=decay_steps
        )
        for step in (2, 8)
    ]
    assert ends == [lr, min_lr]


def test_stays_at_the_peak_after_the_warmup():
    found = rates(warmup_steps=10, max_steps=50, schedule="constant")
    assert found[:10] == rates(warmup_steps=10, max_steps=50)[:10]
    assert found[10:] == [PEAK] * 40


@pytest.mark.parametrize(("warmup_steps", "decay_steps"), [(10, 20), (10, 1), (0, 20), (30, 20), (0, 50)])
def test_stays_at_the_peak_until_the_last_steps_which_fall_in_equal_steps_to_the_minimum(warmup_steps, decay_steps):
    found = rates(warmup_steps=warmup_steps, max_steps=50, schedule="wsd", decay_steps=decay_steps)
    assert found[:warmup_steps] == rates(warmup_steps=warmup_steps, max_steps=50)[:warmup_steps]
    assert found[warmup_steps:-decay_steps] == [PEAK] * (50 - warmup_steps - decay_steps)
    falling = found[-decay_steps:]
    expected = [PEAK - (PEAK - MINIMUM) * (i + 1) / decay_steps for i in range(decay_steps)]
    assert falling == pytest.approx(expected)
    assert falling[-1] == MINIMUM


def test_before_its_decay_wsd_does_not_depend_on_the_length_of_the_run():
    short, long = (rates(warmup_steps=5, max_steps=n, schedule="wsd", decay_steps=10) for n in (40, 90))
    assert short[:30] == long[:30]
    assert long[:80] == [*short[:30], *[PEAK] * 50]


def test_the_first_step_moves():
    assert rates(warmup_steps=10, max_steps=100)[0] == pytest.approx(PEAK / 10)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("max_steps", [1, 2, 10])
def test_a_warmup_as_long_as_the_run_reaches_the_peak(max_steps: int, schedule: Schedule):
    assert rates(warmup_steps=max_steps, max_steps=max_steps, schedule=schedule)[-1] == PEAK


@pytest.mark.parametrize(
    ("schedule", "expected"), [("cosine", MINIMUM), ("linear", MINIMUM), ("wsd", MINIMUM), ("constant", PEAK)]
)
def test_stays_where_it_is_after_the_end(schedule: Schedule, expected: float):
    found = learning_rate(
        500, lr=PEAK, min_lr=MINIMUM, warmup_steps=10, max_steps=100, schedule=schedule, decay_steps=20
    )
    assert found == expected
