"""Heartbeats to a real monitor of NVRx."""

import logging
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_framework.resilience import heartbeat as module
from moe_framework.resilience.heartbeat import MIN_INTERVAL_S, Heartbeat, open_heartbeat

fault_tolerance = pytest.importorskip("nvidia_resiliency_ext.fault_tolerance", exc_type=ImportError)

# Of a step; a step of L0 takes a twentieth of a second or more, and one of a real model a second or more.
MAX_SHARE = 1e-3
SHORT_STEP_S = 0.05

ANSWER_TIMEOUT_S = 2.0


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The process id of a monitor that this process, as a rank, is told of."""
    with tempfile.TemporaryDirectory(prefix="monitor_") as folder:
        path = Path(folder) / "socket"
        config = fault_tolerance.FaultToleranceConfig(
            initial_rank_heartbeat_timeout=600.0,
            rank_heartbeat_timeout=600.0,
            enable_nic_monitor=False,
            log_level=logging.WARNING,
        )
        monkeypatch.setenv("FT_RANK_MONITOR_IPC_SOCKET", str(path))
        monkeypatch.setenv("RANK", "0")
        process = fault_tolerance.RankMonitorServer.run_in_subprocess(config, str(path))
        try:
            yield process.pid
        finally:
            # A monitor that was stopped heeds no other signal.
            process.kill()
            process.join()


class Clock:
    """A clock on which each look is a long time after the one before."""

    def __init__(self):
        self.now = time.monotonic()

    def __call__(self) -> float:
        self.now += MIN_INTERVAL_S
        return self.now


def test_a_beat_costs_less_than_a_thousandth_of_a_step_and_outlives_a_monitor_that_hangs(
    monitor: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *arguments: said.append(text % arguments))
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", ANSWER_TIMEOUT_S)
    answered = count_answers(monkeypatch)
    with open_heartbeat("nvrx", under_launcher=True) as heartbeat:
        silent = median_s(heartbeat, 2000)
        heartbeat._clock = Clock()
        sent = median_s(heartbeat, 200)
        wait_until(lambda: len(answered) >= 200)
        with capsys.disabled():
            print(
                f"\na message takes {1e6 * statistics.median(answered):.0f} µs in its thread, the call that asks for it"
            )
            print(f"{1e6 * sent:.2f} µs, a call that asks for none {1e6 * silent:.2f} µs")
        assert said == []
        # At most one call in MIN_INTERVAL_S sends; with the time of its thread, which may take it from the step.
        assert silent / SHORT_STEP_S + (sent + statistics.median(answered)) / MIN_INTERVAL_S < MAX_SHARE
        os.kill(monitor, signal.SIGSTOP)
        began = time.monotonic()
        while not said:
            assert time.monotonic() - began < 3 * ANSWER_TIMEOUT_S
            before = time.monotonic()
            heartbeat.beat()
            assert time.monotonic() - before < ANSWER_TIMEOUT_S / 2
            time.sleep(0.01)
        heartbeat.beat()
        assert len(said) == 1
        assert said[0].startswith("no more heartbeats")


def count_answers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that gets, with each message that the monitor has answered, how long that took, in seconds."""
    real, answered = fault_tolerance.RankMonitorClient.send_heartbeat, []

    def send_heartbeat(client: Any) -> None:
        began = time.perf_counter()
        real(client)
        answered.append(time.perf_counter() - began)

    monkeypatch.setattr(fault_tolerance.RankMonitorClient, "send_heartbeat", send_heartbeat)
    return answered


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def median_s(heartbeat: Heartbeat, number: int) -> float:
    """Return the median time of a call, in seconds."""
    times = []
    for _ in range(number):
        began = time.perf_counter()
        heartbeat.beat()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
