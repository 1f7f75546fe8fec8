"""Which rank failed first: told through the store that started the ranks, which needs no collective."""

import contextlib
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from moe_framework.errors import ExitCode, MoeFrameworkError, RankError

# torchrun's agent gives the other ranks 30 s after the first has ended, and another node's may not hear of it at all.
LEAVE_AFTER_S = 15.0
POLL_S = 5.0
# An error that all ranks have comes from one collective, so that the ranks have it at about the same time.
SAME_ERROR_S = 5.0
_SAME_ERROR_POLL_S = 0.02
_STORE_TIMEOUT_S = 2.0
_CLAIMS, _FIRST, _EXPECTED = "claims", "first", "expected"


class FirstFailure:
    """The first failure of a start, as its ranks know it.

    While the block runs, a thread looks whether another rank has failed: a rank that waits for it in a collective of
    NCCL does not hear of it, and is ended.

    Args:
        store: The store of the process group; a connection of its own is made, for other threads use the store's.
        start: Name of this start of the ranks, the same on all: the store may outlive them, as torchrun's does.
        rank: This rank.
    """

    def __init__(self, store: dist.Store, start: str, rank: int):  # pyright: ignore[reportPrivateImportUsage]
        own = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # not in torch's stubs
        self._store = dist.PrefixStore(f"failure/{start}", own)  # pyright: ignore[reportPrivateImportUsage]
        self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        self._rank = rank
        self._leave = threading.Timer(LEAVE_AFTER_S, os._exit, (int(ExitCode.FAILED),))
        self._leave.daemon = True
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="first-failure", daemon=True)
        self._compared = False
        self.told = False

    @classmethod
    def of_this_start(cls, group: dist.ProcessGroup) -> "FirstFailure":
        """Make it for the default process group.

        Args:
            group: A gloo group of all ranks.

        Collective: `group`; every rank must call.
        """
        start = [uuid.uuid4().hex]
        dist.broadcast_object_list(start, group=group, group_src=0)
        return cls(dist.distributed_c10d._get_default_store(), start[0], dist.get_rank())

    def __enter__(self) -> Self:
        """Begin to look for failures of other ranks."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop looking. A process that is leaving is still ended if that takes too long."""
        self._ended.set()

    def left(self) -> None:
        """Say that everything is closed, so that the process ends by itself."""
        self._leave.cancel()

    def is_known(self) -> bool:
        """Whether a rank has failed, or the store with it; does not wait."""
        try:
            return self._store.check([_CLAIMS])
        except RuntimeError:  # the rank that kept the store has ended
            return True

    def first(self) -> str | None:
        """What the rank said that failed first; None if none did, or the store is gone."""
        try:
            return self._store.get(_FIRST).decode() if self._store.check([_FIRST]) else None
        except RuntimeError:
            return None

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Print an unexpected error of the block at once, and end the process if leaving takes too long.

        The first rank prints its traceback. The others, which fail because the first is gone, print one line after it.
        The framework's own errors pass, for the entry point to print; one that rank 0 has too is marked as said there.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, MoeFrameworkError) and not isinstance(error, RankError):
                # Before this rank leaves: the others would fail for that, and could end it before it has spoken.
                self._compare(error)
            elif not self.told:
                self._tell(error)
            raise

    def _look(self) -> None:
        while not self._ended.wait(POLL_S):
            if self.is_known():
                with contextlib.suppress(RuntimeError):  # started already, by this rank's own failure
                    self._leave.start()
                return

    def _compare(self, error: MoeFrameworkError) -> None:
        """Mark an error that rank 0 ends with as well; what rank 0 has not said in time, this rank says itself."""
        if self._compared:
            return
        self._compared = True
        text = f"{type(error).__name__}: {error}"
        try:
            if self._rank == 0:
                self._store.set(_EXPECTED, text)
                return
            deadline = time.monotonic() + SAME_ERROR_S
            while not self._store.check([_EXPECTED]):
                if time.monotonic() > deadline:
                    return
                time.sleep(_SAME_ERROR_POLL_S)
            error.said_elsewhere = self._store.get(_EXPECTED).decode() == text
        except RuntimeError:  # the rank that kept the store has ended
            return

    def _tell(self, error: Exception) -> None:
        self.told = True
        with contextlib.suppress(RuntimeError):  # started already: another rank's failure was seen
            self._leave.start()
        line = f"rank {self._rank}: {type(error).__name__}: {error}".splitlines()[0]
        first = self._first_other(line, is_other=isinstance(error, RankError))
        if first is None:
            text = f"rank {self._rank} failed:\n{''.join(traceback.format_exception(error))}"
        else:
            text = f"{line} [after {first}]\n"
        sys.stderr.write(text)
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            # torchrun's own summary names the earliest of these.
            get_error_handler().record_exception(error)

    def _first_other(self, line: str, *, is_other: bool) -> str | None:
        """Return what the first said; None if this rank is the first."""
        try:
            if not is_other and self._store.add(_CLAIMS, 1) == 1:
                self._store.set(_FIRST, line)
                return None
            return self._store.get(_FIRST).decode()
        except RuntimeError:
            return "the rank that kept the store ended"
