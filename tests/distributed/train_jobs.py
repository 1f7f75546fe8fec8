"""What the ranks of the training tests run: the real entry point, whole or cut off, watched from outside.

Each job leaves the pool's process group, because a run starts its own, and calls `train_fsdp2_ep.main`, so that the
exit code and the printed text are those of the documented command.
"""

import contextlib
import hashlib
import io
import logging
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import train_fsdp2_ep
from moe_framework.checkpoint import load
from moe_framework.checkpoint.folder import newest_step, step_number
from moe_framework.checkpoint.state import optimizer_step
from moe_framework.data.loader import Batch, TrainLoader
from moe_framework.data.packing import Rows
from moe_framework.distributed import failure
from moe_framework.errors import DataError
from moe_framework.train import build, loop, persist, saving, step
from moe_framework.train import run as run_module
from moe_framework.train.build import Training
from moe_framework.train.persist import Position


class Ended(NamedTuple):
    """How a command ended on one rank.

    Attributes:
        code: Exit code; None if the run was cut off.
        text: Standard error.
    """

    code: int | None
    text: str


@dataclass
class Seen:
    """What one rank saw of a run.

    Attributes:
        rows: By step, the digest of the inputs and targets of each of this rank's samples, by sample index.
        digests: By step, a digest of all parameters of the model after it.
        start: Where the run started, or None if it did not get so far.
        ended: How it ended.
    """

    rows: dict[int, dict[int, str]] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    start: Position | None = None
    ended: Ended | None = None


class CutOffError(BaseException):
    """Ends a run from inside; no handler of the framework's takes it for an error of its own."""


def command(arguments: list[str], main: Callable[[Sequence[str]], int] = train_fsdp2_ep.main) -> Ended:
    """Run the entry point, or another command, with these arguments."""
    world_size = dist.get_world_size()
    if world_size > 1:
        dist.barrier()
    dist.destroy_process_group()
    text, code = io.StringIO(), None
    with (
        _logging_restored(),
        contextlib.redirect_stderr(text),
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(train_fsdp2_ep, "SILENT_EXIT_DELAY_S", 0.0),
        contextlib.suppress(CutOffError),
    ):
        code = main(arguments)
    return Ended(code, text.getvalue())


def watch(arguments: list[str], *, stop_after: int | None = None, wait_for_save: bool = True) -> Seen:
    """Run the entry point and look on.

    Args:
        arguments: Its arguments.
        stop_after: The step after which every rank is cut off; None for no cut.
        wait_for_save: Cut off only when no save is in the background.
    """
    seen = Seen()
    real_train, real_step, real_next = run_module.train, loop.train_step, TrainLoader.next_step
    training: Any = None
    first = 1

    def train(started: Training, position: Position, *others: Any) -> Position:
        nonlocal training, first
        training, seen.start, first = started, position, position.step + 1
        return real_train(started, position, *others)

    def next_step(loader: TrainLoader) -> list[Batch]:
        number = first + len(seen.rows)
        if number - 1 == stop_after:
            if wait_for_save:
                training.store.wait()
            dist.barrier()
            raise CutOffError
        batches = real_next(loader)
        seen.rows[number] = {sample: text for batch in batches for sample, text in _row_digests(batch).items()}
        return batches

    def train_step(model: Any, *args: Any, **kwargs: Any) -> step.StepResult:
        result = real_step(model, *args, **kwargs)
        seen.digests[first - 1 + len(seen.rows)] = parameter_digest(model)
        return result

    with (
        mock.patch.object(run_module, "train", train),
        mock.patch.object(loop, "train_step", train_step),
        mock.patch.object(TrainLoader, "next_step", next_step),
    ):
        seen.ended = command(arguments)
    return seen


def start_only(arguments: list[str]) -> tuple[Position, int, dict[str, Tensor], str]:
    """Start a run, stop it before its first step, and return where it stands.

    Returns:
        The position, the optimizer's steps, the whole parameters, and what was printed.
    """
    found: list[Any] = []

    def train(training: Training, position: Position, *_: Any) -> None:
        parameters = {name: _whole(p) for name, p in training.model.named_parameters()}
        found.extend((position, optimizer_step(training.optimizer), parameters))
        raise CutOffError

    with mock.patch.object(run_module, "train", train):
        ended = command(arguments)
    assert found, ended
    return found[0], found[1], found[2], ended.text


def draw_after_saving(arguments: list[str], step_number: int) -> list[float]:
    """Run until a step is saved, each rank with random generators of its own; return what they give next."""
    drawn: list[float] = []
    real_save = saving.save
    _seed(100 + dist.get_rank())

    def save(training: Training, position: Position) -> None:
        _draw()  # so that the generators are not where they were at the start
        real_save(training, position)
        if position.step == step_number:
            drawn.extend(_draw())
            training.store.wait()
            dist.barrier()
            raise CutOffError

    with mock.patch.object(saving, "save", save):
        command(arguments)
    return drawn


def draw_after_resuming(arguments: list[str]) -> list[float]:
    """Resume a run and return what this rank's random generators give next."""
    drawn: list[float] = []
    _seed(0)

    def train(training: Training, position: Position, *_: Any) -> None:
        drawn.extend(_draw())
        raise CutOffError

    with mock.patch.object(run_module, "train", train):
        command(arguments)
    return drawn


def data_ends_early(arguments: list[str], *, on_rank: int, at_step: int, error: type[Exception]) -> Ended:
    """Run the entry point; from a step on, the rows of one rank cannot be read."""
    real = Rows.materialise
    num_rows_left = (at_step - 1) * _rows_per_step(arguments)
    rank = dist.get_rank()

    def materialise(rows: Rows, row: int, reverse_complement: bool = False) -> Any:
        nonlocal num_rows_left
        if rank == on_rank and num_rows_left == 0:
            raise error
        num_rows_left -= 1
        return real(rows, row, reverse_complement)

    with mock.patch.object(Rows, "materialise", materialise):
        return command(arguments)


def diverge(arguments: list[str], *, bad_steps: list[int], on_rank: int) -> Seen:
    """Run the entry point; the loss of one rank is NaN in some steps."""
    real = step.forward
    rank, current = dist.get_rank(), 0
    real_counts = loop.agree_on_counts

    def agree_on_counts(*args: Any, **options: Any) -> step.StepCounts:
        nonlocal current
        current += 1
        return real_counts(*args, **options)

    def forward(*args: Any) -> Any:
        output = real(*args)
        bad = current in bad_steps and rank == on_rank
        return output._replace(loss=output.loss * float("nan")) if bad else output

    with mock.patch.object(loop, "agree_on_counts", agree_on_counts), mock.patch.object(step, "forward", forward):
        return watch(arguments)


def signalled(arguments: list[str], *, number: int, on_rank: int, in_step: int) -> Seen:
    """Run the entry point; one rank gets a signal in the middle of a step."""
    real = step.accumulate_gradients
    rank, current = dist.get_rank(), _first_step(arguments) - 1

    def accumulate_gradients(*args: Any) -> Any:
        nonlocal current
        current += 1
        if current == in_step and rank == on_rank:
            os.kill(os.getpid(), number)
        return real(*args)

    with mock.patch.object(step, "accumulate_gradients", accumulate_gradients):
        return watch(arguments)


def signalled_under_launcher(arguments: list[str], exit_file: Path, **options: Any) -> Seen:
    """Run the entry point as `signalled` does, with a launcher that reads the exit code from a file."""
    with mock.patch.dict(os.environ, {"MOE_EXIT_FILE": str(exit_file)}):
        return signalled(arguments, **options)


def fails(arguments: list[str], *, in_step: int) -> Ended:
    """Run the entry point; every rank raises in the middle of a step."""
    real = step.accumulate_gradients
    current = _first_step(arguments) - 1

    def accumulate_gradients(*args: Any) -> Any:
        nonlocal current
        current += 1
        if current == in_step:
            raise ValueError("a bad batch")
        return real(*args)

    with mock.patch.object(step, "accumulate_gradients", accumulate_gradients):
        return command(arguments)


def refuses(arguments: list[str], errors: list[str | None]) -> Ended:
    """Run the entry point; each rank raises its error before training, or is cut off there if it has none."""
    own = errors[dist.get_rank()]

    def train(*_: Any) -> Position:
        raise CutOffError if own is None else DataError(own)

    with mock.patch.object(run_module, "train", train), mock.patch.object(failure, "SAME_ERROR_S", 0.5):
        return command(arguments)


def parameter_digest(model: torch.nn.Module) -> str:
    """SHA-256 of this rank's part of every parameter."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(local.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _row_digests(batch: Batch) -> dict[int, str]:
    pairs = zip(batch.sample_ids, batch.tokens, batch.targets, strict=True)
    return {sample: hashlib.sha256(torch.stack([x, y]).numpy().tobytes()).hexdigest() for sample, x, y in pairs}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _rows_per_step(arguments: list[str]) -> int:
    chosen = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    return int(chosen["train.global_batch_size"]) // dist.get_world_size()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _first_step(arguments: list[str]) -> int:
    chosen = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    latest = newest_step(Path(chosen["run.dir"]) / chosen["run.name"] / "checkpoints")
    return 1 if latest is None else 1 + (step_number(latest) or 0)


def _draw() -> list[float]:
    return [torch.rand(()).item(), float(np.random.random()), random.random()]


@contextlib.contextmanager
def _logging_restored() -> Iterator[None]:
    package = logging.getLogger("moe_framework")
    before = list(package.handlers), package.level, package.propagate
    try:
        yield
    finally:
        package.handlers, package.level, package.propagate = before


def command_on_own_file(arguments: list[str], paths: list[str]) -> Ended:
    """Run the entry point; each rank finds another file under the name."""
    path, real = paths[dist.get_rank()], build.open_data
    with mock.patch.object(build, "open_data", lambda _, cut: real(path, cut)):
        return command(arguments)


def command_with_own_arguments(arguments: list[str], own: list[list[str]]) -> Ended:
    """Run the entry point, each rank with some arguments of its own."""
    return command([*arguments, *own[dist.get_rank()]])


def start_while_another_run_saves(arguments: list[str], older: Path) -> tuple[Position, int, dict[str, Tensor], str]:
    """Start a run as `start_only` does; ranks that look for the newest step after rank 0 would find another one."""
    real, rank = persist.newest_step, dist.get_rank()

    def newest_step(path: Path) -> Path | None:
        return older if rank else real(path)

    with mock.patch.object(persist, "newest_step", newest_step), mock.patch.object(build, "newest_step", newest_step):
        return start_only(arguments)


def command_on_a_step_that_is_replaced(arguments: list[str]) -> Ended:
    """Run the entry point; the last rank reads the manifest of a step that was saved again under the same name."""
    real, last = load.read_manifest, dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(load, "read_manifest", lambda path: replace(real(path), publication=77 if last else 1)):
        return command(arguments)
