"""Our checkpoints as a source of tensors, whatever the layout they were saved at."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from moe_framework.checkpoint.convert.base import Region, TensorInfo
from moe_framework.checkpoint.convert.boxes import region_shape, whole
from moe_framework.checkpoint.convert.dcp_item import StoredItem, locate_item, read_item
from moe_framework.checkpoint.manifest import RESTORE, Manifest, read_manifest
from moe_framework.checkpoint.safe_pickle import read_metadata
from moe_framework.checkpoint.verify import check_metadata, damaged_files
from moe_framework.errors import CheckpointError

COMPANION_PREFIX = "hf."
MODEL_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."


class ChunkReader:
    """Boxes of tensors from the files of a DCP checkpoint.

    Args:
        folder: The folder of the files.
        metadata: Its metadata, from an unpickler that runs nothing, checked against the folder.
    """

    def __init__(self, folder: Path, metadata: Metadata):
        self._folder = folder
        self._storage: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._tensors = {
            name: tensor
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        self._files: dict[str, int] = {}
        self._items: dict[MetadataIndex, StoredItem] = {}

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by its name."""
        return {name: TensorInfo(tuple(tensor.size), tensor.properties.dtype) for name, tensor in self._tensors.items()}

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """See `TensorSource.read`; only the chunks that overlap the region are touched."""
        tensor = self._tensors[name]
        region = whole(tuple(tensor.size)) if region is None else region
        box = torch.empty(region_shape(region), dtype=tensor.properties.dtype)
        for chunk in tensor.chunks:
            overlap = [
                (max(part.start, offset), min(part.stop, offset + size))
                for part, offset, size in zip(region, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(low >= high for low, high in overlap):
                continue
            inside = tuple(
                slice(low - offset, high - offset) for (low, high), offset in zip(overlap, chunk.offsets, strict=True)
            )
            values = self._read_chunk(name, chunk, inside)
            if values.shape == box.shape:
                return values
            place = tuple(
                slice(low - part.start, high - part.start) for (low, high), part in zip(overlap, region, strict=True)
            )
            box[place] = values
        return box

    def location(self, name: str) -> str:
        """How a tensor is stored: number of its chunks and of their files."""
        chunks = self._tensors[name].chunks
        files = {self._storage[MetadataIndex(name, chunk.offsets)].relative_path for chunk in chunks}
        where = next(iter(files)) if len(files) == 1 else f"{len(files)} files"
        return where if len(chunks) == 1 else f"{len(chunks)} chunks in {where}"

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _read_chunk(self, name: str, chunk: ChunkStorageMetadata, region: Region) -> Tensor:
        index = MetadataIndex(name, chunk.offsets)
        info = self._storage[index]
        path = self._folder / info.relative_path
        descriptor = self._open(path)
        item = self._items.get(index)
        if item is None:
            expected = TensorInfo(tuple(chunk.sizes), self._tensors[name].properties.dtype)
            item = locate_item(descriptor, f"{path}: '{name}'", info.offset, info.length, expected)
            self._items[index] = item
        return read_item(descriptor, path, item, region)

    def _open(self, path: Path) -> int:
        # Threads that open the same file at once would leave one descriptor unused: setdefault closes it.
        descriptor = self._files.get(path.name)
        if descriptor is not None:
            return descriptor
        try:
            opened = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error}).") from error
        kept = self._files.setdefault(path.name, opened)
        if kept != opened:
            os.close(opened)
        return kept


class DcpSource:
    """A step of ours; a `TensorSource`.

    Args:
        step_dir: The step's folder.

    Attributes:
        path: The step's folder.
        manifest: Its manifest.
        companions: Hugging Face's files that a conversion left in the step, by their own names.

    Raises:
        CheckpointError: The step is incomplete, damaged or unsafe. The tensors' files are checked by `check_files`.
    """

    def __init__(self, step_dir: Path):
        self.path = step_dir
        self.manifest: Manifest = read_manifest(step_dir)
        metadata = read_metadata(step_dir)
        check_metadata(step_dir, self.manifest, metadata)
        self._reader = ChunkReader(step_dir, metadata)
        self.companions = {
            name.removeprefix(COMPANION_PREFIX): step_dir / name
            for name in self.manifest.files
            if name.startswith(COMPANION_PREFIX)
        }

    def check_files(self, *, rank: int = 0, num_ranks: int = 1) -> None:
        """Compare files with their checksums in the manifest.

        Args:
            rank: This rank, which checks its share of the files.
            num_ranks: Ranks that share them out.

        Raises:
            CheckpointError: Files are missing or damaged; the message has all of this rank's.
        """
        problems = damaged_files(self.path, self.manifest, rank=rank, num_ranks=num_ranks)
        if problems:
            raise CheckpointError("\n".join(problems) + f" {RESTORE}")

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor, the optimizer's too, by its name in the step."""
        return self._reader.tensors()

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """See `TensorSource.read`."""
        return self._reader.read(name, region)

    def location(self, name: str) -> str:
        """How a tensor is stored."""
        return self._reader.location(name)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def config(self) -> dict[str, Any]:
        """See `TensorSource.config`."""
        return sizes_of_state(self.manifest.state, str(self.path))


def sizes_of_state(state: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Sizes of the model that a step's state describes.

    Args:
        state: `state` of the manifest, of a training run or of a conversion.
        where: The step, for the message.

    Returns:
        See `TensorSource.config`.

    Raises:
        CheckpointError: The state describes no model.
    """
    conversion = state.get("conversion")
    if isinstance(conversion, dict) and isinstance(conversion.get("sizes"), dict):
        return dict(conversion["sizes"])
    try:
        sizes = dict(state["config"]["model"])
        if sizes["head_dim"] is None:
            sizes["head_dim"] = sizes["hidden_size"] // sizes["num_heads"]
        return {**sizes, "family": "qwen3_moe" if sizes["qk_norm"] else "mixtral"}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{where}: manifest.json does not say which model this is ({error!r}). Give a step of a training run."
        ) from error
