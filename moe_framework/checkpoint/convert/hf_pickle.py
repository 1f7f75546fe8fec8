"""The old .bin files of Hugging Face: pickles, read as weights only, and only when that was asked for."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_framework.checkpoint.convert.base import Region, TensorInfo
from moe_framework.checkpoint.convert.hf_config import CONFIG_NAME, read_hf_config, sizes_of_hf
from moe_framework.checkpoint.convert.hf_source import companions_of
from moe_framework.errors import CheckpointError


class HfPickleSource:
    """The pytorch_model*.bin files of a folder, mapped into memory; a `TensorSource`.

    Args:
        folder: The folder, with config.json.

    Attributes:
        path: The folder.
        companions: The files that describe the model, by name.

    Raises:
        CheckpointError: A file is missing, damaged, or holds anything but tensors.
    """

    def __init__(self, folder: Path):
        self.path = folder
        self.companions = companions_of(folder)
        self._config = read_hf_config(folder / CONFIG_NAME)
        self._tensors: dict[str, Tensor] = {}
        self._files: dict[str, str] = {}
        for path in sorted(folder.glob("pytorch_model*.bin")):
            for name, tensor in _load(path).items():
                if type(tensor) is not Tensor or not isinstance(name, str):
                    raise CheckpointError(f"{path}: '{name}' is not a plain tensor. Nothing was run.")
                self._tensors[name], self._files[name] = tensor, path.name
        if not self._tensors:
            raise CheckpointError(f"{folder}: has no pytorch_model*.bin.")

    def tensors(self) -> dict[str, TensorInfo]:
        """See `TensorSource.tensors`."""
        return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """See `TensorSource.read`."""
        tensor = self._tensors[name]
        return (tensor if region is None else tensor[region]).clone(memory_format=torch.contiguous_format)

    def config(self) -> dict[str, Any]:
        """See `TensorSource.config`."""
        return sizes_of_hf(self._config, str(self.path / CONFIG_NAME))

    def location(self, name: str) -> str:
        """Name of the file that holds a tensor."""
        return self._files[name]

    def close(self) -> None:
        """Let go of the files."""
        self._tensors.clear()


def _load(path: Path) -> dict[Any, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: refused: {reason}. Nothing was run.") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: not a table of tensors. Nothing was run.")
    return loaded
