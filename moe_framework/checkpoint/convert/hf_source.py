"""A Hugging Face folder as a source of tensors."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_framework.checkpoint.convert.base import Region, TensorInfo
from moe_framework.checkpoint.convert.boxes import read_box
from moe_framework.checkpoint.convert.hf_config import CONFIG_NAME, read_hf_config, sizes_of_hf
from moe_framework.checkpoint.convert.safetensors_file import Place, read_header
from moe_framework.checkpoint.manifest import is_plain_name
from moe_framework.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

# What transformers reads beside the weights; code (*.py) is not carried along.
COMPANIONS = (
    CONFIG_NAME,
    INDEX_NAME,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def companions_of(folder: Path) -> dict[str, Path]:
    """Files of a Hugging Face folder that describe the model, by name."""
    return {name: folder / name for name in COMPANIONS if (folder / name).is_file()}


class HfSource:
    """The safetensors files of a folder; a `TensorSource`.

    Args:
        folder: The folder, with config.json and one file or an index.

    Attributes:
        path: The folder.
        companions: The files that describe the model, by name.

    Raises:
        CheckpointError: Files are missing, truncated or malformed, or not what the index says.
    """

    def __init__(self, folder: Path):
        self.path = folder
        self._config = read_hf_config(folder / CONFIG_NAME)
        self.companions = companions_of(folder)
        self._places: dict[str, tuple[Path, Place]] = {}
        weight_map = _weight_map(folder)
        for file in sorted(set(weight_map.values())) if weight_map else [SINGLE_NAME]:
            for name, place in read_header(folder / file).items():
                if weight_map is None or weight_map.get(name) == file:
                    self._places[name] = (folder / file, place)
                elif name not in weight_map:
                    raise CheckpointError(f"{folder / file}: '{name}' is not in {INDEX_NAME}. Copy the folder again.")
        missing = sorted((weight_map or {}).keys() - self._places.keys())
        if missing:
            lines = "\n".join(f"{folder}: '{name}' is in {INDEX_NAME}, but not in its file." for name in missing)
            raise CheckpointError(f"{lines} Copy the folder again.")
        self._files = {path: os.open(path, os.O_RDONLY) for path in {path for path, _ in self._places.values()}}

    def tensors(self) -> dict[str, TensorInfo]:
        """See `TensorSource.tensors`."""
        return {name: place.info for name, (_, place) in self._places.items()}

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """See `TensorSource.read`."""
        path, place = self._places[name]
        return read_box(self._files[path], path, place.begin, place.info, region)

    def config(self) -> dict[str, Any]:
        """See `TensorSource.config`."""
        return sizes_of_hf(self._config, str(self.path / CONFIG_NAME))

    def location(self, name: str) -> str:
        """Name of the file that holds a tensor."""
        return self._places[name][0].name

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def read_weight_map(path: Path) -> dict[str, str]:
    """Read an index: tensor → file.

    Args:
        path: The index.

    Raises:
        CheckpointError: It is malformed, or a file is not directly in the folder.
    """
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        plain = all(isinstance(file, str) and is_plain_name(file) for file in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not an index of tensors ({error!r}). Copy it again.") from error
    if not plain:
        raise CheckpointError(f"{path}: refers to files outside of the folder; refused.")
    return weight_map


def _weight_map(folder: Path) -> dict[str, str] | None:
    if (folder / INDEX_NAME).is_file():
        weight_map = read_weight_map(folder / INDEX_NAME)
        missing = sorted(file for file in set(weight_map.values()) if not (folder / file).is_file())
        if missing:
            held = Counter(weight_map.values())
            lines = "\n".join(f"{folder / file}: missing; it holds {held[file]} tensors." for file in missing)
            raise CheckpointError(f"{lines} Copy the files that {INDEX_NAME} names.")
        return weight_map
    if (folder / SINGLE_NAME).is_file():
        return None
    if any(folder.glob("pytorch_model*.bin")):
        raise CheckpointError(
            f"{folder}: has no safetensors, only pickles (pytorch_model*.bin), which can run code. Ask for "
            "safetensors, or give --allow-pickle if you trust the source; even then they are read as weights only."
        )
    raise CheckpointError(f"{folder}: has neither {SINGLE_NAME} nor {INDEX_NAME}.")
