"""Losses that stand out are told, and nothing else is."""

import random
import statistics

import pytest

from moe_framework.observe.loss_spike import LEAST, WINDOW, LossSpikeAlarm


def losses(count: int) -> list[float]:
    rng = random.Random(0)
    return [2.0 + rng.gauss(0, 0.1) for _ in range(count)]


def test_a_spike_is_told_with_its_height_above_the_last_losses():
    alarm, before = LossSpikeAlarm(6.0), losses(2 * WINDOW)
    assert [alarm.height(loss) for loss in before] == [None] * len(before)
    window = before[-WINDOW:]
    expected = (3.5 - statistics.fmean(window)) / statistics.stdev(window)
    assert alarm.height(3.5) == pytest.approx(expected)


def test_low_losses_and_losses_that_are_not_finite_are_no_spikes():
    alarm = LossSpikeAlarm(6.0)
    for loss in losses(WINDOW):
        alarm.height(loss)
    assert alarm.height(0.1) is None
    assert alarm.height(float("nan")) is None
    assert alarm.height(float("inf")) is None
    # They are not counted either: the next spike is still one.
    assert alarm.height(9.0) is not None


def test_there_is_no_alarm_before_enough_losses_nor_for_constant_ones_nor_when_off():
    early = LossSpikeAlarm(3.0)
    assert [early.height(loss) for loss in [2.0, 2.1] * (LEAST // 2 - 1)] == [None] * (LEAST - 2)
    assert early.height(50.0) is None
    constant = LossSpikeAlarm(3.0)
    assert [constant.height(2.0) for _ in range(WINDOW)] == [None] * WINDOW
    assert constant.height(2.0001) is None
    off = LossSpikeAlarm(0.0)
    assert [off.height(loss) for loss in [*losses(WINDOW), 100.0]] == [None] * (WINDOW + 1)
