"""What the ranks of the tests of failed saves run: the real entry point, on a disk that changes under it."""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from moe_framework.checkpoint import save
from moe_framework.checkpoint.folder import complete_steps, step_number
from moe_framework.data.loader import TrainLoader
from moe_framework.train import lock, saving
from moe_framework.train import run as run_module
from moe_framework.train.build import Training, checkpoint_dir
from moe_framework.train.saving import Saver
from tests.distributed.train_jobs import Ended, command
from tests.helpers.mounts import set_writable

BALLAST = "ballast"


@dataclass
class Seen:
    """What one rank saw of a run.

    Attributes:
        ended: How it ended.
        steps: Before each optimizer step, the digest of every complete checkpoint by its number.
        left_overs: Before each optimizer step, what is in the checkpoint folder besides them and `latest`.
    """

    ended: Ended | None = None
    steps: dict[int, dict[int, str]] = field(default_factory=dict)
    left_overs: dict[int, list[str]] = field(default_factory=dict)


def fill(disk: Path, *, room: int = 0) -> None:
    """Fill a disk to the last byte, or to the last `room` bytes."""
    with contextlib.suppress(OSError), (disk / BALLAST).open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with (disk / BALLAST).open("ab") as file:
        file.truncate(max(0, file.tell() - room))


def empty(disk: Path) -> None:
    """Make room again."""
    (disk / BALLAST).unlink()


ACTIONS: dict[str, Callable[[Path], None]] = {
    "fill": fill,
    "nearly fill": lambda disk: fill(disk, room=300_000),
    "empty": empty,
    "read-only": lambda disk: set_writable(disk, writable=False),
    "writable": lambda disk: set_writable(disk, writable=True),
}


def run_on_disk(arguments: list[str], disk: Path, actions: dict[int, str]) -> Seen:
    """Run the entry point; before some steps, when no save is being written, something happens to a disk.

    Args:
        arguments: Of the entry point.
        disk: The disk.
        actions: Names of `ACTIONS` by optimizer step; `-1` stands for the moment before the second try of a save.
    """
    with (
        _before_steps(lambda number: _act(disk, actions.get(number)), waiting=True) as seen,
        _before_second_try(lambda: _act(disk, actions.get(-1))),
    ):
        seen.ended = command(arguments)
    return seen


def fail_on_one_rank(arguments: list[str], *, on_rank: int, step: int) -> Seen:
    """Run the entry point; one rank's disk is full while a step is saved."""
    genuine = save._Writer.write_data

    def write_data(writer: save._Writer, *args: Any) -> Any:
        if dist.get_rank() == on_rank and step_number(Path(writer.path)) == step:
            raise OSError(28, "No space left on device")
        return genuine(writer, *args)

    with mock.patch.object(save._Writer, "write_data", write_data), _before_steps(waiting=True) as seen:
        seen.ended = command(arguments)
    return seen


def write_slowly(arguments: list[str], *, slow: int, until: int) -> Seen:
    """Run the entry point; the save of one step takes until another step begins, or the run gives up."""
    genuine_write, genuine_newest = save._Writer.write_data, Saver.newest
    release = threading.Event()

    def write_data(writer: save._Writer, *args: Any) -> Any:
        if step_number(Path(writer.path)) == slow:
            assert release.wait(60)
        return genuine_write(writer, *args)

    def newest(saver: Saver) -> str:
        release.set()
        return genuine_newest(saver)

    with (
        mock.patch.object(save._Writer, "write_data", write_data),
        mock.patch.object(Saver, "newest", newest),
        _before_steps(lambda number: release.set() if number == until else None, waiting=False) as seen,
    ):
        seen.ended = command(arguments)
    return seen


@contextlib.contextmanager
def _before_steps(act: Callable[[int], None] = lambda number: None, *, waiting: bool) -> Iterator[Seen]:
    """Look at the checkpoints before each step, then act; with `waiting`, once the save in the background has ended."""
    seen, number, training = Seen(), 0, None
    real_train, real_next = run_module.train, TrainLoader.next_step

    def train(started: Training, position: Any, *rest: Any) -> Any:
        nonlocal training, number
        training, number = started, position.step
        return real_train(started, position, *rest)

    def next_step(loader: TrainLoader) -> Any:
        nonlocal number
        number += 1
        assert training is not None
        in_flight = training.store._in_flight
        if waiting and in_flight is not None:
            wait([in_flight])
        dist.barrier()
        directory = checkpoint_dir(training.config)
        seen.steps[number] = {step_number(step) or 0: _digest(step) for step in complete_steps(directory)}
        known = {"latest", lock.NAME, BALLAST, *(step.name for step in complete_steps(directory))}
        left = directory.iterdir() if directory.exists() else ()
        seen.left_overs[number] = sorted(path.name for path in left if path.name not in known)
        dist.barrier()
        act(number)
        dist.barrier()
        return real_next(loader)

    with mock.patch.object(run_module, "train", train), mock.patch.object(TrainLoader, "next_step", next_step):
        yield seen


@contextlib.contextmanager
def _before_second_try(act: Callable[[], None]) -> Iterator[None]:
    tried: list[int] = []
    real_save = saving.save

    def save_again(training: Training, position: Any) -> None:
        if tried.count(position.step) == 1:
            act()
            dist.barrier()
        tried.append(position.step)
        real_save(training, position)

    with mock.patch.object(saving, "save", save_again), mock.patch.object(saving, "RETRY_PAUSE_S", 0.01):
        yield


def _act(disk: Path, name: str | None) -> None:
    if name is not None and dist.get_rank() == 0:
        ACTIONS[name](disk)


def _digest(step_dir: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(step_dir.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
