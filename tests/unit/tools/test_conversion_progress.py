import io

import pytest

from tools.conversion.progress import ByteProgress, format_bytes


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_short_task_prints_nothing():
    clock, stream = Clock(), io.StringIO()
    with ByteProgress("converting", 100, stream, clock) as progress:
        clock.now = 9.0
        progress.advance(50)
    assert stream.getvalue() == ""


def test_a_long_task_says_bytes_speed_and_time_left_every_ten_seconds():
    clock, stream = Clock(), io.StringIO()
    with ByteProgress("converting", 4 * 10**9, stream, clock) as progress:
        for _ in range(3):
            clock.now += 10
            progress.advance(10**9)
            progress.advance(0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "converting: 1.0 GB of 4.0 GB  100.0 MB/s  0:30 left"
    assert lines[2] == "converting: 3.0 GB of 4.0 GB  100.0 MB/s  0:10 left"
    assert len(lines) == 3


def test_a_terminal_has_a_bar():
    stream = Terminal()
    with ByteProgress("converting", 100, stream) as progress:
        progress.advance(100)
        progress.close()
    assert "converting" in stream.getvalue()
    assert "100/100 bytes" in stream.getvalue()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (94e9, "94.0 GB"), (1.3e12, "1.30 TB")]
)
def test_bytes_are_written_in_decimal_units(count: float, text: str):
    assert format_bytes(count) == text
