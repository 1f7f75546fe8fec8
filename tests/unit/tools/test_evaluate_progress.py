import io

from tests.unit.tools.test_conversion_progress import Clock, Terminal
from tools.evaluation.progress import BatchProgress


def test_a_long_evaluation_says_speed_and_time_left_every_ten_seconds_without_the_first_batch():
    clock, stream = Clock(), io.StringIO()
    with BatchProgress(enabled=True, num_data_ranks=2, stream=stream, clock=clock) as progress:
        for done in range(1, 7):
            clock.now += 100 if done == 1 else 5
            progress.heard(done, 10, 50)
    assert stream.getvalue().splitlines() == [
        "batch 2/10  20 tokens/s  0:40 left",
        "batch 4/10  20 tokens/s  0:30 left",
        "batch 6/10  20 tokens/s  0:20 left",
    ]


def test_other_ranks_say_nothing():
    clock, stream = Clock(), io.StringIO()
    with BatchProgress(enabled=False, num_data_ranks=1, stream=stream, clock=clock) as progress:
        for done in (1, 2, 3):
            clock.now += 20
            progress.heard(done, 3, 50)
    assert stream.getvalue() == ""


def test_on_a_terminal_there_is_a_bar():
    clock, stream = Clock(), Terminal()
    with BatchProgress(enabled=True, num_data_ranks=1, stream=stream, clock=clock) as progress:
        for done in (1, 2, 3):
            clock.now += 2
            progress.heard(done, 3, 50)
    assert "3/3" in stream.getvalue()
    assert "25 tokens/s" in stream.getvalue()
