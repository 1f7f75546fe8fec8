"""Heartbeats to a real monitor of NVRx."""

import logging
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

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
            process.terminate()
            process.join(10)
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
    with open_heartbeat("nvrx", under_launcher=True) as heartbeat:
        silent = median_s(heartbeat, 2000)
        heartbeat._clock = Clock()
        sent = median_s(heartbeat, 200)
        with capsys.disabled():
            print(f"\na message takes {1e6 * sent:.0f} µs, a call that sends none {1e6 * silent:.2f} µs")
        assert said == []
        assert sent > 5 * silent
        # At most one call in MIN_INTERVAL_S sends.
        assert silent / SHORT_STEP_S + sent / MIN_INTERVAL_S < MAX_SHARE
        os.kill(monitor, signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(3):
            heartbeat.beat()
        assert time.monotonic() - began < 2 * ANSWER_TIMEOUT_S
        assert len(said) == 1
        assert said[0].startswith("no more heartbeats")


def median_s(heartbeat: Heartbeat, number: int) -> float:
    """Return the median time of a call, in seconds."""
    times = []
    for _ in range(number):
        began = time.perf_counter()
        heartbeat.beat()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
