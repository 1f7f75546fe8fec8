"""The first signal is a request, the second ends the process, also while the main thread waits in a call."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from moe_framework.resilience.signals import HOPELESS_S, SAME_REQUEST_S, StopRequest

FAILED = 1


def wait_for(condition) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "nothing came within 5 s"
        time.sleep(0.01)


@pytest.mark.parametrize("number", StopRequest.SIGNALS)
def test_the_first_signal_is_a_request_and_handlers_are_put_back(number: signal.Signals):
    before = signal.getsignal(number)
    with StopRequest(hopeless=lambda: False, failed_code=FAILED) as stop:
        assert stop.signal_name is None
        os.kill(os.getpid(), number)
        wait_for(lambda: stop.signal_name == number.name)
        # From a launcher and its agent alike: still one request.
        os.kill(os.getpid(), number)
        time.sleep(0.1)
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_request_from_before_the_block_is_found_in_its_file(tmp_path: Path):
    file = tmp_path / "stop"
    with StopRequest(file, hopeless=lambda: False, failed_code=FAILED) as stop:
        assert stop.signal_name is None
    file.touch()
    with StopRequest(file, hopeless=lambda: False, failed_code=FAILED) as stop:
        assert stop.signal_name == "SIGUSR1"


def test_a_request_that_was_obeyed_is_followed_by_any_number():
    with StopRequest(hopeless=lambda: False, failed_code=FAILED) as stop:
        stop.obey()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert stop.signal_name is None


def child(body: str) -> subprocess.Popen:
    program = f"""
        import os, signal, sys, threading, time
        from moe_framework.resilience.signals import HOPELESS_S, SAME_REQUEST_S, StopRequest
        {body}
        print("ready", flush=True)
        threading.Event().wait(60) if sys.argv[1:] else time.sleep(60)
        """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_second_signal_ends_the_process_at_once_and_says_so():
    # A lock's wait does not return to the interpreter for a signal handler's sake, as a collective does not.
    body = "StopRequest(hopeless=lambda: False, failed_code=1).__enter__(); lock = threading.Lock(); lock.acquire()"
    process = child(body)
    process.send_signal(signal.SIGUSR1)
    time.sleep(SAME_REQUEST_S + 0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=5)
    assert process.returncode == 128 + signal.SIGTERM
    assert text == "SIGTERM after SIGUSR1: ends at once; the last published step is kept\n"


def test_sigterm_ends_the_process_where_no_step_boundary_will_come():
    process = child("StopRequest(hopeless=lambda: True, failed_code=7).__enter__()")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HOPELESS_S + 5)
    assert process.returncode == 7
