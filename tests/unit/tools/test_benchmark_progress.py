"""Progress lines: silent in a short run, with the time left in a long one, in any process."""

import pickle

import pytest

from tools.benchmarks import progress
from tools.benchmarks.progress import ProgressLines


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(progress, "time", fake)
    return fake


def test_a_short_run_prints_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]):
    lines = ProgressLines(total=2)
    for _ in range(2):
        clock.now += 1.0
        lines.advance("case")
    assert capsys.readouterr() == ("", "")


def test_a_long_run_says_the_time_left_on_standard_error(clock: Clock, capsys: pytest.CaptureFixture[str]):
    lines = ProgressLines(total=100)
    for _ in range(4):
        clock.now += 2.0
        lines.advance("case")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "case: 2/100 repetitions, 3:16 left\ncase: 4/100 repetitions, 3:12 left\n"


def test_repetitions_of_another_process_count(clock: Clock, capsys: pytest.CaptureFixture[str]):
    lines = ProgressLines(total=100)
    other = pickle.loads(pickle.dumps(lines))
    clock.now = 50.0
    other.advance("other")
    lines.skip(49)
    lines.advance("own")
    clock.now = 100.0
    lines.advance("own")
    assert capsys.readouterr().err == (
        "other: 1/100 repetitions, 1:22:30 left\n"
        "own: 50/100 repetitions, 0:50 left\n"
        "own: 51/100 repetitions, 1:36 left\n"
    )
