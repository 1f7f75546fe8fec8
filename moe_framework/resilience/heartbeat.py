"""Heartbeats to the monitor that NVRx's ft_launcher keeps of each rank; the one home of nvidia_resiliency_ext.

The monitor ends a rank that it has not heard from for too long, and the launcher then starts all ranks again.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, Self

from moe_framework.errors import ConfigError, DependencyError

logger = logging.getLogger(__name__)

# The monitor looks every few seconds, so that more messages would tell it nothing.
MIN_INTERVAL_S = 1.0

# Longest wait for the monitor's answer. Without a limit, a monitor that hangs would hang the rank.
ANSWER_TIMEOUT_S = 10.0


class MonitorClient(Protocol):
    """What is used of NVRx's RankMonitorClient (0.4.1)."""

    def send_heartbeat(self) -> None:
        """Send a message, and wait for the answer."""
        ...

    def shutdown_workload_monitoring(self) -> None:
        """End the connection."""
        ...


class Heartbeat:
    """Tells the launcher's monitor that this rank goes on; without a client, nothing.

    Args:
        client: A connected client, or None.
        clock: Seconds of a monotonic clock.
    """

    def __init__(self, client: MonitorClient | None = None, *, clock: Callable[[], float] = time.monotonic):
        self._client = client
        self._clock = clock
        self._not_before: float | None = None

    def beat(self) -> None:
        """Say that the rank goes on; at most one message a second is sent.

        The first call sends nothing: until the first message the monitor applies the longer of its two timeouts, so
        that one is for what comes after this call, such as a first step that compiles.
        """
        if self._client is None:
            return
        now = self._clock()
        if self._not_before is None:
            self._not_before = now
        elif now >= self._not_before:
            self._not_before = now + MIN_INTERVAL_S
            self._send(self._client)

    def close(self) -> None:
        """End the monitoring; the rank may then take any time."""
        client, self._client = self._client, None
        if client is not None:
            # The monitor may be gone by now, and then there is nothing to end.
            with contextlib.suppress(Exception):
                client.shutdown_workload_monitoring()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _send(self, client: MonitorClient) -> None:
        try:
            client.send_heartbeat()
        except Exception as error:  # whatever it is, training does not depend on it
            logger.warning(
                "no more heartbeats: this rank's monitor hangs, or has ended as it does at SIGUSR1 (%s)",
                error,
            )
            self.close()


class BackgroundClient:
    """Sends from a thread of its own: on a busy host the monitor, another process, may take a while to answer.

    A rank that hangs asks for no message, so that the monitor notices it all the same.

    Args:
        client: A connected client.
    """

    def __init__(self, client: MonitorClient):
        self._client = client
        self._error: Exception | None = None
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="heartbeat", daemon=True)
        self._thread.start()

    def send_heartbeat(self) -> None:
        """Ask for a message.

        Raises:
            Exception: The message before could not be sent.
        """
        if self._error is not None:
            raise self._error
        self._asked.put(True)

    def shutdown_workload_monitoring(self) -> None:
        """End the connection, once what was asked for is sent."""
        self._asked.put(False)
        self._thread.join(ANSWER_TIMEOUT_S)
        self._client.shutdown_workload_monitoring()

    def _send(self) -> None:
        while self._asked.get():
            try:
                self._client.send_heartbeat()
            except Exception as error:  # raised by the next call
                self._error = error
                return


def open_heartbeat(mode: str, *, under_launcher: bool) -> Heartbeat:
    """Connect to this rank's monitor.

    Args:
        mode: `auto` (where there is a monitor), `nvrx` or `off`: `resilience.heartbeat`.
        under_launcher: Whether NVRx's ft_launcher started this rank.

    Returns:
        The heartbeat, to be closed; one that does nothing where there is no monitor, or it does not answer.

    Raises:
        ConfigError: `nvrx` without ft_launcher.
        DependencyError: nvidia_resiliency_ext cannot be imported.
    """
    if mode == "nvrx" and not under_launcher:
        raise ConfigError(
            "resilience.heartbeat=nvrx: ft_launcher did not start this rank, so nothing listens. "
            "Use launchers/slurm_ft.sbatch or ft_launcher, or set resilience.heartbeat=auto."
        )
    if mode == "off" or not under_launcher:
        return Heartbeat()
    try:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
    except ImportError as error:
        raise DependencyError(
            f"resilience.heartbeat={mode} needs nvidia_resiliency_ext, which failed to import "
            f"({type(error).__name__}: {error}). Install '.[resilience]' or set resilience.heartbeat=off."
        ) from error
    client = RankMonitorClient()
    try:
        client.init_workload_monitoring()
        client.rank_monitor_socket.settimeout(ANSWER_TIMEOUT_S)  # pyright: ignore[reportOptionalMemberAccess]
    except Exception as error:
        logger.warning("no heartbeats: the launcher's monitor of this rank does not answer (%s)", error)
        return Heartbeat()
    return Heartbeat(BackgroundClient(client))
