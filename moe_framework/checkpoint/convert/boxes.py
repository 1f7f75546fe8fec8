"""Boxes of tensors: cutting a tensor into parts, and reading a box of one that lies row-major in a file."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from moe_framework.checkpoint.convert.base import Region, TensorInfo
from moe_framework.errors import CheckpointError

# Large enough for a disk to stream, small enough that a few of them per thread don't count in memory.
PART_BYTES = 16 * 2**20

# A gap that is cheaper to read over than to seek over.
_GAP_BYTES = 2**20


def whole(shape: tuple[int, ...]) -> Region:
    """The region of a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def region_shape(region: Region) -> tuple[int, ...]:
    """Shape of a region."""
    return tuple(part.stop - part.start for part in region)


def parts(info: TensorInfo, limit: int = PART_BYTES) -> Iterator[Region]:
    """Cut a tensor into boxes that follow each other in row-major order, each contiguous in the tensor.

    Args:
        info: The tensor.
        limit: Largest size of a part, in bytes.

    Yields:
        The boxes; one for a tensor that is small enough, or empty.
    """
    if info.num_bytes <= limit:
        yield whole(info.shape)
        return
    sizes = [math.prod(info.shape[dim + 1 :]) * info.dtype.itemsize for dim in range(len(info.shape))]
    dim = next(dim for dim, size in enumerate(sizes) if size <= limit)
    yield from _cut(info.shape, dim, limit // sizes[dim])


def _cut(shape: tuple[int, ...], dim: int, rows: int) -> Iterator[Region]:
    """Single indices of the dims before `dim`, ranges of `rows` of it, all of those after."""
    rest = whole(shape[dim + 1 :])
    for index in range(math.prod(shape[:dim])):
        leading: list[slice] = []
        for size in reversed(shape[:dim]):
            index, place = divmod(index, size)
            leading.insert(0, slice(place, place + 1))
        for start in range(0, shape[dim], rows):
            yield (*leading, slice(start, min(start + rows, shape[dim])), *rest)


def read_box(descriptor: int, path: Path, begin: int, info: TensorInfo, region: Region | None) -> Tensor:
    """Read a box of a tensor that lies row-major and little-endian in a file.

    Args:
        descriptor: The file, open for reading.
        path: Its path, for messages.
        begin: Where the tensor's first byte is.
        info: The whole tensor.
        region: The box; None for the whole.

    Returns:
        The box, contiguous, in memory of its own.

    Raises:
        CheckpointError: The file ends before, or cannot be read.
    """
    region = whole(info.shape) if region is None else region
    box = torch.empty(region_shape(region), dtype=info.dtype)
    if box.numel():
        _fill(box, descriptor, path, begin, info.shape, region)
    return box


def _fill(box: Tensor, descriptor: int, path: Path, begin: int, shape: tuple[int, ...], region: Region) -> None:
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(part.start * stride for part, stride in zip(region, strides, strict=True))
    last = sum((part.stop - 1) * stride for part, stride in zip(region, strides, strict=True))
    span = last - first + 1
    at = begin + first * box.element_size()
    if span == box.numel():
        _read_into(box, descriptor, path, at)
    elif span * box.element_size() <= _GAP_BYTES or span <= 2 * box.numel():
        covering = torch.empty(span, dtype=box.dtype)
        _read_into(covering, descriptor, path, at)
        box.copy_(covering.as_strided(box.shape, strides))
    else:
        dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
        low, high = region[dim].start, region[dim].stop
        middle = (low + high) // 2
        # Halves and not single rows, of which a box of columns has thousands.
        for start, stop in ((low, middle), (middle, high)):
            inner = (*region[:dim], slice(start, stop), *region[dim + 1 :])
            _fill(box.narrow(dim, start - low, stop - start), descriptor, path, begin, shape, inner)


def _read_into(target: Tensor, descriptor: int, path: Path, at: int) -> None:
    view = bytes_of(target)
    done = 0
    try:
        while done < len(view):
            count = os.preadv(descriptor, [view[done : done + 2**30]], at + done)
            if count == 0:
                raise CheckpointError(
                    f"{path}: ends at byte {at + done}, where data should be: it is truncated. Copy it again."
                )
            done += count
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from error


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()).cast("B")
