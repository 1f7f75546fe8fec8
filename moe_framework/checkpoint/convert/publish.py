"""A folder that appears only when it is complete, and the room that it needs."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_framework.checkpoint.manifest import sync_folder
from moe_framework.errors import CheckpointError

PARTIAL_SUFFIX = ".partial"

# Headers, tables of contents and tokenizers, and blocks that are not full.
_SPARE_BYTES = 2**20


@contextmanager
def publishing(target: Path) -> Iterator[Path]:
    """Give a new folder to write into, which becomes `target` if the block ends without an error.

    What a killed process left behind is removed first; a second process that writes to the same target is refused.

    Args:
        target: The folder to make.

    Yields:
        An empty folder beside it, named `target` with `.partial`. After an error it is removed.

    Raises:
        CheckpointError: The target exists, or is being written by another process.
        OSError: The folder cannot be made.
    """
    check_free(target)
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        _lock(descriptor, partial)
        try:
            check_free(target)  # another process may have finished it in the meantime
            _empty(partial)
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        partial.rename(target)
        sync_folder(target.parent)
    finally:
        os.close(descriptor)


def check_free(target: Path) -> None:
    """Refuse a target that exists: nothing is ever overwritten.

    Args:
        target: The folder to make.

    Raises:
        CheckpointError: It exists, or its parent is not a folder.
    """
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target}: exists. Give another name, or remove it first.")
    if target.parent.exists() and not target.parent.is_dir():
        raise CheckpointError(f"{target}: {target.parent} is not a folder. Give another name.")


def check_space(target: Path, num_bytes: int) -> None:
    """Check that the disk has room.

    Args:
        target: The folder to make.
        num_bytes: Bytes of all tensors.

    Raises:
        CheckpointError: There is too little.
    """
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    # What a killed process left behind will be removed.
    reclaimed = sum(path.stat().st_blocks * 512 for path in partial.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + reclaimed
    if free < num_bytes + _SPARE_BYTES:
        raise CheckpointError(
            f"{target}: needs {num_bytes + _SPARE_BYTES:,} bytes, and {folder} has {free:,} free. Free some, or give "
            "a folder on another disk."
        )


def _lock(descriptor: int, partial: Path) -> None:
    try:
        # Released by the kernel however the process ends.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # One that failed has removed the folder that was opened, and one that is newer may have made another.
        is_there = partial.exists() and os.path.samestat(os.fstat(descriptor), partial.stat())
    except OSError:
        is_there = False
    if not is_there:
        raise CheckpointError(f"{partial}: another conversion is writing it. Wait for it, or give another name.")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
