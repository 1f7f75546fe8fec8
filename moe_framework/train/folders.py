"""The folders of a run, which belong to it alone while it runs, and the error where they cannot be written."""

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moe_framework.config.schema import Config
from moe_framework.distributed.collectives import together
from moe_framework.errors import ConfigError
from moe_framework.train.build import checkpoint_dir, run_dir
from moe_framework.train.lock import NAME as LOCK_NAME
from moe_framework.train.lock import locked

logger = logging.getLogger(__name__)


class _Folder(NamedTuple):
    key: str
    value: str
    path: Path


@contextlib.contextmanager
def own_folders(config: Config, *, is_main: bool) -> Iterator[None]:
    """Make the folders of the run and of its checkpoints, and keep other runs out of them for the block.

    To be entered before anything reads them: what a look at the checkpoints finds half done, it finishes or removes.
    After the block, those that this start made and that are empty are removed: a start that was refused leaves nothing.

    Args:
        config: The run's.
        is_main: Whether this is rank 0, which does so for all.

    Raises:
        ConfigError: One cannot be written, or is another run's; on every rank.

    Collective: the world; every rank must call.
    """
    with contextlib.ExitStack() as locks:
        together(lambda: _take(config, locks) if is_main else None)
        yield


@contextlib.contextmanager
def writing(key: str, value: str, path: Path) -> Iterator[None]:
    """Turn an error of the file system in the block into one that names the key.

    Args:
        key: That says where to write.
        value: Its value.
        path: What is written.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{key}={value}: cannot write {path} ({os.strerror(error.errno or 0)}). "
            f"Set {key} to a folder that can be written."
        ) from error


def _take(config: Config, locks: contextlib.ExitStack) -> None:
    folders, made = _folders(config), set[Path]()
    for key, value, path in folders:
        with writing(key, value, path):
            new = [one for one in (path, *path.parents) if not one.exists()]
            made.update(new)
            # Registered before the locks, and so called after them: on NFS an open file keeps its folder.
            locks.callback(_remove_empty, new)
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "not writable")
    run, checkpoints = folders
    # The checkpoints may lie in the run's folder itself, which cannot be locked twice.
    to_lock = [run] if run.path.samefile(checkpoints.path) else folders
    unlocked = []
    for key, value, path in to_lock:
        with writing(key, value, path):
            if not locks.enter_context(locked(f"{key}={value}", path)):
                unlocked.append(str(path))
            elif path in made:
                locks.callback(_remove_lock_of_unused, path, made)
    if unlocked:
        logger.warning(
            "%s: the file system has no locks, so that nothing keeps a second run out; two would overwrite each other",
            " and ".join(unlocked),
        )


def _remove_lock_of_unused(folder: Path, made: set[Path]) -> None:
    """Remove the file of the lock while it is held: one who waits for it sees that, and opens another."""
    with contextlib.suppress(OSError):
        if _is_unused(folder, made):
            (folder / LOCK_NAME).unlink()


def _is_unused(folder: Path, made: set[Path]) -> bool:
    return all(one.name == LOCK_NAME or (one in made and _is_unused(one, made)) for one in folder.iterdir())


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):  # such as one that is not empty, which its parents then aren't either
        for folder in folders:
            folder.rmdir()


def _folders(config: Config) -> list[_Folder]:
    run = _Folder("run.dir", config.run.dir, run_dir(config))
    path = checkpoint_dir(config)
    if config.checkpoint.ckpt_dir is None:
        return [run, run._replace(path=path)]
    return [run, _Folder("checkpoint.ckpt_dir", config.checkpoint.ckpt_dir, path)]
