"""What the ranks of the evaluation tests run: the command itself, whole, watched, or with a rank that cannot read."""

from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from moe_framework.data.loader import Batch
from moe_framework.data.packing import Rows
from moe_framework.errors import DataError
from moe_framework.train import build, evaluation
from tests.distributed.train_jobs import Ended, command
from tools import evaluate


class Watched(NamedTuple):
    """An evaluation that was looked on.

    Attributes:
        ended: How it ended.
        num_gradients: Parameters that have a gradient after it.
        rows: Numbers of the rows that this rank read.
        preferred: The expert backend that is taken where several could be.
    """

    ended: Ended
    num_gradients: int
    rows: tuple[int, ...]
    preferred: str | None


def evaluated(arguments: list[str]) -> Ended:
    """Run tools/evaluate.py with these arguments."""
    return command(arguments, evaluate.main)


def watched(arguments: list[str]) -> Watched:
    """Run tools/evaluate.py without an optimizer to be had."""
    found: list[int] = []
    rows: list[int] = []
    real = evaluation.measure

    def measure(model: Any, batches: Any, **options: Any) -> Any:
        def seen() -> Any:
            batch: Batch
            for batch in batches:
                rows.extend(row for row in batch.sample_ids if row >= 0)
                yield batch

        result = real(model, seen(), **options)
        found.append(sum(parameter.grad is not None for parameter in model.parameters()))
        return result

    choose = mock.Mock(side_effect=evaluation.choose_backend)
    with (
        mock.patch.object(evaluation, "measure", measure),
        mock.patch.object(evaluation, "choose_backend", choose),
        mock.patch.object(build, "build_adamw", side_effect=AssertionError("no optimizer is needed")),
    ):
        ended = evaluated(arguments)
    return Watched(ended, sum(found), tuple(rows), choose.call_args.kwargs["preferred"])


def unreadable(arguments: list[str], *, on_rank: int, after: int) -> Ended:
    """Run tools/evaluate.py; one rank cannot read its rows after the first few."""
    real, rank, left = Rows.materialise, dist.get_rank(), after

    def materialise(rows: Rows, row: int, reverse_complement: bool = False) -> Any:
        nonlocal left
        left -= 1
        if rank == on_rank and left < 0:
            raise DataError("data.path=/x: row cannot be read. Mend the file.")
        return real(rows, row, reverse_complement)

    with mock.patch.object(Rows, "materialise", materialise):
        return evaluated(arguments)
