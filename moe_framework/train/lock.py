"""The lock by which one run at a time has a folder; the kernel frees it however the process ends."""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from moe_framework.errors import ConfigError

logger = logging.getLogger(__name__)

NAME = ".lock"

# A killed process keeps its lock until its memory is freed, which takes a while with much of it pinned; a server of
# NFS keeps that of a lost host until its lease ends, after 90 s by default.
WAIT_S = 120.0
POLL_S = 0.5

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextlib.contextmanager
def locked(setting: str, folder: Path) -> Iterator[bool]:
    """Keep other processes that call this out of a folder for the block; wait first if one is in it.

    Args:
        setting: That chose the folder, such as `run.name=a`; begins the error.
        folder: It can be written; made where another process has removed it meanwhile.

    Yields:
        Whether other processes are kept out: some file systems have no locks.

    Raises:
        ConfigError: Another process still has the folder after `WAIT_S` seconds.
        OSError: The file of the lock cannot be opened.
    """
    path = folder / NAME
    with contextlib.ExitStack() as files:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            files.enter_context(_closing(descriptor))
            has_locks = _acquire(descriptor, path, setting)
            if not has_locks or _is_at(descriptor, path):
                break
            files.close()  # the run that was waited for made the folder, was refused, and removed it
        try:
            _write(descriptor, f"process {os.getpid()} on {socket.gethostname()}")
            yield has_locks
        finally:
            _write(descriptor, "")
            # Closing frees the lock only where no child has a copy of the descriptor.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    """Close a descriptor after the block, and at once in children: with a copy, one would keep the lock of a dead run.

    Programs that a child is replaced by don't inherit it.
    """
    opened = [descriptor]

    def close_in_child() -> None:
        while opened:
            os.close(opened.pop())

    os.register_at_fork(after_in_child=close_in_child)
    try:
        yield
    finally:
        opened.clear()
        with contextlib.suppress(OSError):  # such as a file system that is gone: the run is done
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _acquire(descriptor: int, path: Path, setting: str) -> bool:
    end = time.monotonic() + WAIT_S
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        if time.monotonic() >= end:
            raise ConfigError(
                f"{setting}: {path.parent} is in use by {_holder(path)}, and two runs in one folder would overwrite "
                "each other. Wait for that run, or end it, or set another run.name or checkpoint.ckpt_dir."
            )
        if not told:
            told = True
            logger.warning("%s is in use by %s; waits up to %.0f s for it to end", path.parent, _holder(path), WAIT_S)
        time.sleep(POLL_S)


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") or "another process"
    except OSError:
        return "another process"


def _write(descriptor: int, text: str) -> None:
    """Say who holds the lock; it holds without that, as on a full disk."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
