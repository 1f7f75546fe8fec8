"""Small file systems of a test's own, that can be full or read-only; the test is skipped where none may be mounted."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a file system in memory, and unmount it after the block.

    Args:
        folder: Where; it is made.
        num_bytes: How much it holds, rounded up to pages.

    Yields:
        The folder.
    """
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazily: after a failed test a file may still be open, or the folder be read-only.
        while folder.is_mount():
            subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def set_writable(folder: Path, *, writable: bool) -> None:
    """Make a file system of `small_disk`'s read-only, or writable again; mode bits would not stop root.

    Files that are open stay writable, and would keep it from being remounted: a second mount covers it.
    """
    if writable:
        subprocess.run(["umount", str(folder)], check=True)
    else:
        subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)


def used_bytes(folder: Path) -> int:
    """Return what is taken of the file system that holds a folder."""
    answer = subprocess.run(["df", "--output=used", "-B1", str(folder)], capture_output=True, text=True, check=True)
    return int(answer.stdout.split()[-1])
