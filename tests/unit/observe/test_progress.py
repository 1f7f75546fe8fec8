import io

import pytest

from moe_framework.observe.progress import Progress, format_duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_steps(progress: Progress, clock: Clock, durations: list[float], first_step: int = 0) -> None:
    for index, seconds in enumerate(durations, start=1):
        clock.now += seconds
        progress.update(first_step + index, 1.25, 12345.6)


def test_plain_lines_show_step_loss_speed_and_time_left():
    stream, clock = io.StringIO(), Clock()
    run_steps(Progress(4, 0, True, stream, every=1, clock=clock), clock, [2.0, 2.0, 2.0, 2.0])
    assert stream.getvalue().splitlines() == [
        "step 1/4  loss 1.2500  12,346 tokens/s  0:06 left",
        "step 2/4  loss 1.2500  12,346 tokens/s  0:04 left",
        "step 3/4  loss 1.2500  12,346 tokens/s  0:02 left",
        "step 4/4  loss 1.2500  12,346 tokens/s  0:00 left",
    ]


def test_a_slow_first_step_does_not_spoil_later_estimates():
    stream, clock = io.StringIO(), Clock()
    run_steps(Progress(100, 0, True, stream, clock=clock), clock, [60.0, 1.0, 1.0])
    assert stream.getvalue().splitlines()[-1].endswith("1:37 left")


def test_time_left_of_a_resumed_run_counts_this_process_only():
    stream, clock = io.StringIO(), Clock()
    run_steps(Progress(100, 90, True, stream, clock=clock), clock, [1.0, 3.0], first_step=90)
    assert [line.split("  ")[-1] for line in stream.getvalue().splitlines()] == ["0:09 left", "0:24 left"]


def test_plain_lines_come_every_few_steps_and_at_both_ends():
    stream, clock = io.StringIO(), Clock()
    run_steps(Progress(25, 3, True, stream, every=10, clock=clock), clock, [1.0] * 22, first_step=3)
    assert [line.split("/")[0] for line in stream.getvalue().splitlines()] == [
        "step 4",
        "step 10",
        "step 20",
        "step 25",
    ]


def test_a_disabled_rank_shows_nothing():
    for stream in (io.StringIO(), Terminal()):
        progress = Progress(2, 0, False, stream)
        progress.update(1, 1.0, 1.0)
        progress.note("hello")
        progress.close()
        assert stream.getvalue() == ""


def test_without_a_terminal_no_control_codes_are_written():
    stream = io.StringIO()
    progress = Progress(2, 0, True, stream)
    progress.note("[bold]saved[/bold] /tmp/x")
    progress.update(1, float("nan"), 1.0)
    progress.close()
    assert stream.getvalue().startswith("[bold]saved[/bold] /tmp/x\nstep 1/2  loss nan")
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_bar_with_loss_and_time_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream, clock = Terminal(), Clock()
    progress = Progress(4, 0, True, stream, clock=clock)
    run_steps(progress, clock, [2.0, 2.0, 2.0])
    progress.note("saved step_00000003")
    progress.close()
    shown = stream.getvalue()
    assert "3/4" in shown
    assert "loss 1.2500" in shown
    assert "0:02 left" in shown
    assert "saved step_00000003\n" in shown


def test_a_note_longer_than_the_terminal_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    progress = Progress(4, 0, True, stream)
    progress.note("x" * 100)
    progress.close()
    assert "x" * 100 in stream.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (90061, "25:01:01")])
def test_durations_read_like_a_clock(seconds: float, text: str):
    assert format_duration(seconds) == text
