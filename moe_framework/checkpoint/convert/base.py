"""What a checkpoint format has to offer: tensors that are read by region, and a place to stream tensors to."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

# A box of a tensor: one slice a dim, with start and stop inside the tensor and no step.
Region = tuple[slice, ...]


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the values, in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorSource(Protocol):
    """A checkpoint that is open for reading. Nothing is read before it is asked for."""

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by the name that its format gives it."""
        ...

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Read a tensor or a box of it; from several threads at once.

        Args:
            name: A name of `tensors()`.
            region: One slice a dim, with start and stop and no step; None for the whole tensor.

        Returns:
            The values on the CPU, contiguous, in the stored dtype, in memory that the caller may overwrite.

        Raises:
            CheckpointError: The file is damaged or cannot be read.
        """
        ...

    def config(self) -> dict[str, Any]:
        """Sizes of the model as the format knows them.

        Returns:
            Our keys without `model.`, such as `num_layers`, head_dim always resolved; `family` (a key of
            `families.FAMILIES`); and what only a family has, such as `num_dense_layers`.

        Raises:
            CheckpointError: The model is none that can be converted.
        """
        ...


class CheckpointFile(TensorSource, Protocol):
    """A source with files of its own.

    Attributes:
        path: The checkpoint's folder.
        companions: Files that describe the model to Hugging Face's libraries, by name; empty where there are none.
    """

    path: Path
    companions: dict[str, Path]

    def location(self, name: str) -> str:
        """Say in which file, or in how many, a tensor lies."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class TensorSink(Protocol):
    """A checkpoint that is being written into a folder of its own, which the caller publishes after `finish`."""

    def begin(self, tensors: dict[str, TensorInfo], config: dict[str, Any]) -> None:
        """Lay out the files.

        Args:
            tensors: Every tensor that will come, by the format's own names.
            config: As `TensorSource.config` returns it.

        Raises:
            CheckpointError: The format cannot hold this model.
            OSError: The folder cannot be written.
        """
        ...

    def write(self, name: str, offset: tuple[int, ...], part: Tensor) -> None:
        """Write a box of a tensor. Threads write different tensors at once; one tensor's parts come from one thread.

        Args:
            name: A name given to `begin`.
            offset: Where the box begins in the tensor.
            part: Contiguous, on the CPU. The parts of a tensor come in row-major order without a gap, and each is
                contiguous in the whole tensor too: leading dims of size 1, then a range of one dim, then whole dims.

        Raises:
            OSError: The file cannot be written.
        """
        ...

    def finish(self) -> None:
        """Write what describes the tensors; every file is durable when this returns.

        Raises:
            OSError: A file cannot be written.
        """
        ...

    def abort(self) -> None:
        """Close the files after a failure; the caller removes the folder."""
        ...
