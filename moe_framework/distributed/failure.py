"""Which rank failed first: told through the store that started the ranks, which needs no collective."""

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from moe_framework.errors import ExitCode, MoeFrameworkError, RankError

# torchrun's agent gives the other ranks 30 s after the first has ended.
LEAVE_AFTER_S = 20.0
_STORE_TIMEOUT_S = 2.0
_CLAIMS, _FIRST = "failure/claims", "failure/first"


class FirstFailure:
    """The first failure of a job, as its ranks know it.

    Args:
        store: The store of the process group; a connection of its own is made, for other threads use the store's.
        rank: This rank.
    """

    def __init__(self, store: dist.Store, rank: int):  # pyright: ignore[reportPrivateImportUsage]
        self._store = store.clone()  # pyright: ignore[reportAttributeAccessIssue]  # not in torch's stubs
        self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        self._rank = rank
        self._leave = threading.Timer(LEAVE_AFTER_S, os._exit, (int(ExitCode.FAILED),))
        self._leave.daemon = True
        self.told = False

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
        The framework's own errors are the same on every rank, and pass.
        """
        try:
            yield
        except Exception as error:
            expected = isinstance(error, MoeFrameworkError) and not isinstance(error, RankError)
            if not self.told and not expected:
                self._tell(error)
            raise

    def left(self) -> None:
        """Say that everything is closed, so that the process ends by itself."""
        self._leave.cancel()

    def _tell(self, error: Exception) -> None:
        self.told = True
        self._leave.start()
        # torchrun's own summary names the earliest of these.
        get_error_handler().record_exception(error)
        line = f"rank {self._rank}: {type(error).__name__}: {error}".splitlines()[0]
        first = self._first_other(line, is_other=isinstance(error, RankError))
        if first is None:
            text = f"rank {self._rank} failed:\n{''.join(traceback.format_exception(error))}"
        else:
            text = f"{line} [after {first}]\n"
        sys.stderr.write(text)
        sys.stderr.flush()

    def _first_other(self, line: str, *, is_other: bool) -> str | None:
        """Return what the first said; None if this rank is the first."""
        try:
            if not is_other and self._store.add(_CLAIMS, 1) == 1:
                self._store.set(_FIRST, line)
                return None
            return self._store.get(_FIRST).decode()
        except RuntimeError:
            return "the rank that kept the store ended"


def default_store() -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()
