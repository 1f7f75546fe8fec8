"""Signals that ask a run to stop: the first is a request, the second ends the process."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Self

# Slurm and torchrun's agent may each pass the same request on to a rank; so soon after the first it is not a second.
SAME_REQUEST_S = 2.0
HOPELESS_S = 5.0


class StopRequest:
    """Hears SIGTERM and SIGUSR1 from construction of the block to its end.

    A thread reads the signals from a socket to which Python's handler writes them at once. The main thread may be
    inside a collective for as long as that lasts, and Python's own handlers would wait for it.

    Args:
        stop_file: If it is there, the request was made before the block began; None for no such file.
        hopeless: Asked at a SIGTERM: whether a step boundary will never come, as after another rank failed. The process
            is then ended soon, unless it does so by itself.
        failed_code: Exit code in that case.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, stop_file: Path | None = None, *, hopeless: Callable[[], bool], failed_code: int):
        self._stop_file = stop_file
        self._hopeless = hopeless
        self._failed_code = failed_code
        self._first: tuple[signal.Signals, float] | None = None
        self._obeyed = False

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that asks this rank to stop, such as `SIGUSR1`; None without one."""
        return None if self._first is None else self._first[0].name

    def obey(self) -> None:
        """Say that the request has been carried out: signals that still come end nothing."""
        self._obeyed = True

    def __enter__(self) -> Self:
        """Begin to listen.

        Raises:
            ValueError: Not called in the main thread.
        """
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old_handlers = {number: signal.signal(number, _only_wake) for number in self.SIGNALS}
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="stop-signals", daemon=True)
        self._thread.start()
        # After the handlers are there, so that a request comes by one way or the other.
        if self._stop_file is not None and self._stop_file.exists():
            self._hear(signal.SIGUSR1)
        return self

    def __exit__(self, *_: object) -> None:
        """Put the handlers back that were there before."""
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _listen(self) -> None:
        while received := self._reader.recv(64):
            for number in received:
                if number in self.SIGNALS:
                    self._hear(signal.Signals(number))

    def _hear(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._obeyed or (self._first is not None and now - self._first[1] < SAME_REQUEST_S):
            return
        if self._first is not None:
            _say(f"{number.name} after {self._first[0].name}: ends at once; the last published step is kept")
            os._exit(128 + number)
        if number == signal.SIGTERM and self._hopeless():
            # Where the error of the other rank reaches this one, it is left the time to say so.
            leave = threading.Timer(HOPELESS_S, os._exit, (self._failed_code,))
            leave.daemon = True
            leave.start()
        self._first = (number, now)


def _only_wake(_number: int, _frame: FrameType | None) -> None:
    """Keep the signal's default action from happening; the thread does the rest."""


def _say(text: str) -> None:
    # The main thread may hold the lock of sys.stderr.
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())
