"""What a checkpoint holds, and how two differ: numbers for `tools/inspect_checkpoint.py`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_framework.checkpoint.convert.base import CheckpointFile, Region, TensorInfo, TensorSource
from moe_framework.checkpoint.convert.check import check_tensors
from moe_framework.checkpoint.convert.dcp_source import OPTIMIZER_PREFIX, DcpSource
from moe_framework.checkpoint.convert.formats import keymap_of
from moe_framework.checkpoint.convert.megatron_source import MegatronSource
from moe_framework.checkpoint.convert.stream import for_each_part
from moe_framework.checkpoint.convert.views import OurView
from moe_framework.errors import CheckpointError


@dataclass
class Statistics:
    """Numbers over all elements of a tensor, in float64.

    Attributes:
        square_sum: Sum of the squares.
        total: Sum.
        count: Number of elements.
        least: Smallest element.
        greatest: Largest.
        nonfinite: Number of elements that are infinite or no number.
    """

    square_sum: float = 0.0
    total: float = 0.0
    count: int = 0
    least: float = math.inf
    greatest: float = -math.inf
    nonfinite: int = 0

    @property
    def norm(self) -> float:
        """The L2 norm."""
        return math.sqrt(self.square_sum) if self.square_sum >= 0 else math.nan

    def add(self, values: Tensor) -> None:
        """Take more elements in."""
        exact = values.double()
        self.count += exact.numel()
        if exact.numel():
            self.square_sum += float(exact.square().sum())
            self.total += float(exact.sum())
            self.least = min(self.least, float(exact.min()))
            self.greatest = max(self.greatest, float(exact.max()))
            self.nonfinite += int((~torch.isfinite(exact)).sum())


@dataclass
class Difference:
    """How a tensor differs between two checkpoints.

    Attributes:
        largest: Largest absolute difference of two elements; NaN if one is no number.
        square_sum: Sum of the squares of the differences.
        reference: Sum of the squares of the first checkpoint's elements.
        count: Number of elements that differ.
    """

    largest: float = 0.0
    square_sum: float = 0.0
    reference: float = 0.0
    count: int = 0

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the first."""
        if self.square_sum == 0:
            return 0.0
        return math.sqrt(self.square_sum / self.reference) if self.reference else math.inf

    def add(self, one: Tensor, other: Tensor) -> None:
        """Take more elements in."""
        left, right = one.double(), other.double()
        # Equal bits are equal, also where both are NaN, of which nothing is equal.
        unequal = (left != right) & ~(left.isnan() & right.isnan())
        self.count += int(unequal.sum())
        self.reference += float(left.square().sum())
        if unequal.any():
            gap = torch.where(unequal, left - right, 0.0)
            largest = float(gap.abs().max())
            self.largest = largest if math.isnan(largest) else max(self.largest, largest)
            self.square_sum += float(gap.square().sum())


@dataclass(frozen=True)
class Progress:
    """How far training was when a checkpoint was saved.

    Attributes:
        step: Optimizer steps done; None where the format does not tell.
        optimizer: Whether the optimizer's state is in it, without which no run goes on from it.
    """

    step: int | None
    optimizer: bool

    def __str__(self) -> str:
        """Return it as a sentence's end."""
        step = "" if self.step is None else f"step {self.step:,}, "
        return step + ("with the optimizer's state" if self.optimizer else "without an optimizer's state")


def progress_of(source: CheckpointFile) -> Progress:
    """Return how far training was; no tensor is read.

    Args:
        source: The checkpoint.
    """
    if isinstance(source, DcpSource):
        has_optimizer = any(name.startswith(OPTIMIZER_PREFIX) for name in source.manifest.tensors)
        return Progress(source.manifest.step, has_optimizer)
    if isinstance(source, MegatronSource):
        return Progress(source.iteration, source.has_optimizer)
    return Progress(None, optimizer=False)


def statistics_of(source: TensorSource, names: list[str], *, workers: int) -> dict[str, Statistics]:
    """Read tensors and sum their numbers up.

    Args:
        source: The checkpoint.
        names: Tensors to read.
        workers: Threads.

    Returns:
        Name → statistics.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    known = source.tensors()
    found = {name: Statistics() for name in names}
    for_each_part(
        {name: known[name] for name in names},
        lambda name, region: found[name].add(source.read(name, region)),
        workers=workers,
    )
    return found


def table_of(source: CheckpointFile, statistics: Mapping[str, Statistics]) -> list[dict[str, Any]]:
    """One entry for each tensor: name, shape, dtype, where it is stored and, if known, its norm.

    Args:
        source: The checkpoint.
        statistics: Of the tensors that were read.
    """
    return [
        {
            "name": name,
            "shape": list(info.shape),
            "dtype": str(info.dtype).removeprefix("torch."),
            "stored": source.location(name),
            "norm": statistics[name].norm if name in statistics else None,
        }
        for name, info in source.tensors().items()
    ]


def differences(one: TensorSource, other: TensorSource, *, workers: int) -> dict[str, Difference | str]:
    """Compare two checkpoints by name.

    Args:
        one: A checkpoint.
        other: Another one, with the same naming.
        workers: Threads.

    Returns:
        Name → the difference, for every tensor that is not equal; text where the two cannot be compared.

    Raises:
        CheckpointError: A checkpoint is damaged.
    """
    left, right = one.tensors(), other.tensors()
    found: dict[str, Difference | str] = {name: "only in the first" for name in left if name not in right}
    found |= {name: "only in the second" for name in right if name not in left}
    common: dict[str, TensorInfo] = {}
    for name in left:
        if name in right:
            if left[name].shape == right[name].shape:
                common[name] = left[name]
            else:
                found[name] = f"{list(left[name].shape)} in the first, {list(right[name].shape)} in the second"
    measured = {name: Difference() for name in common}

    def compare(name: str, region: Region) -> None:
        measured[name].add(one.read(name, region), other.read(name, region))

    for_each_part(common, compare, workers=workers)
    return found | {name: difference for name, difference in measured.items() if difference.count}


def under_our_names(source: CheckpointFile, kind: str) -> TensorSource:
    """See a checkpoint under our names, so that it can be compared with one of another format.

    Args:
        source: The checkpoint.
        kind: Its format.

    Raises:
        CheckpointError: It has not the tensors that its sizes need.
    """
    keymap = keymap_of(kind, source.config(), source.tensors())
    check_tensors(source, keymap, str(source.path))
    return OurView(source, keymap)


def sample_of(source: TensorSource, name: str, limit: int = 8) -> list[float]:
    """The first elements of a tensor.

    Args:
        source: The checkpoint.
        name: The tensor.
        limit: How many.

    Raises:
        CheckpointError: There is no such tensor, or the checkpoint is damaged.
    """
    info = source.tensors().get(name)
    if info is None:
        raise CheckpointError(f"--tensor={name}: there is no such tensor. Run without --tensor for the list.")
    if not info.num_bytes:
        return []
    rows = [slice(0, 1)] * (len(info.shape) - 1)
    region = (*rows, slice(0, min(limit, info.shape[-1]))) if info.shape else ()
    return [float(value) for value in source.read(name, region).flatten().double()]
