"""A process group of one rank inside the test process, and configurations small enough for it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from moe_framework.config.load import load_config, parse_command_line
from moe_framework.config.schema import Config
from moe_framework.config.validate import validate
from moe_framework.distributed.runtime import LaunchEnvironment, Runtime, start
from tests.helpers.tiny_runs import ROOT, arguments


@contextlib.contextmanager
def one_rank() -> Iterator[Runtime]:
    """Start a group of one rank on the CPU, and end it after the block."""
    with start(LaunchEnvironment(), "cpu") as runtime:
        yield runtime


def tiny_config(folder: Path, *changes: str) -> Config:
    """Return the validated configuration of a tiny run on one rank.

    Args:
        folder: Holds its data and its run; see `tiny_runs.arguments`.
        *changes: Overrides.
    """
    line = parse_command_line(arguments(folder, "parallel.ep=1", *changes))
    return validate(load_config(line.config_name, line.overrides, ROOT / "configs"), world_size=1, local_world_size=1)
