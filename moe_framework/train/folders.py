"""The folders of a run, and the error where they cannot be written."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from moe_framework.config.schema import Config
from moe_framework.errors import ConfigError
from moe_framework.train.build import checkpoint_dir, run_dir


def make_directories(config: Config) -> None:
    """Make the folders of the run and of its checkpoints, before any long work.

    Raises:
        ConfigError: One cannot be written.
    """
    folders = [("run.dir", config.run.dir, run_dir(config))]
    if config.checkpoint.ckpt_dir is not None:
        folders.append(("checkpoint.ckpt_dir", config.checkpoint.ckpt_dir, checkpoint_dir(config)))
    for key, value, directory in folders:
        with writing(key, value, directory):
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "not writable")


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
