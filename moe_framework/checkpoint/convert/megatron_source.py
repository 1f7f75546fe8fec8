"""Megatron-Core's `torch_dist` checkpoints as a source of tensors: neither Megatron nor a GPU is needed."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from moe_framework.checkpoint.convert.base import Region, TensorInfo
from moe_framework.checkpoint.convert.dcp_source import ChunkReader
from moe_framework.checkpoint.convert.megatron_common import read_common
from moe_framework.checkpoint.convert.megatron_sizes import our_sizes
from moe_framework.checkpoint.manifest import is_plain_name
from moe_framework.checkpoint.safe_pickle import METADATA_NAME, read_metadata
from moe_framework.checkpoint.verify import chunk_problem
from moe_framework.errors import CheckpointError

BACKEND_NAME = "metadata.json"
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
TRACKER_NAME = "latest_checkpointed_iteration.txt"
_NOT_MODEL = re.compile(r"(chained_\d+\.)?optimizer\..*")
_WRAPPER = "module."


class MegatronSource:
    """A checkpoint that Megatron-Core's `dist_checkpointing.save` wrote; a `TensorSource`.

    Names are Megatron's keys, without the `module.` that some programs put before them. The optimizer's tensors are
    not offered.

    Args:
        path: The checkpoint, or the folder of a training run, whose latest checkpoint is taken.
        sizes: What the caller knows of the model, by our keys (see `TensorSource.config`): needed for what
            neither tensors nor arguments tell, and for the vocabulary's true size.

    Attributes:
        path: The folder that is read.
        companions: Empty: Megatron keeps no files of Hugging Face.
        iteration: Training iterations that Megatron had done, 0 if it does not tell.
        has_optimizer: Whether the checkpoint has the optimizer's tensors.

    Raises:
        CheckpointError: There is no complete checkpoint, or it is of another kind, damaged or unsafe; nothing was run.
    """

    def __init__(self, path: Path, sizes: Mapping[str, Any] | None = None):
        self.path = find_checkpoint(path)
        self.companions: dict[str, Path] = {}
        _check_backend(self.path)
        metadata = read_metadata(self.path, allow_bytes=True)
        _check_storage(self.path, metadata)
        common = read_common(self.path, metadata)
        iteration = common.get("iteration")
        self.iteration = iteration if isinstance(iteration, int) else 0
        self._args: dict[str, Any] = common.get("args", {})
        self._given = dict(sizes or {})
        self._reader = ChunkReader(self.path, metadata)
        self._keys = _model_keys(self._reader.tensors())
        self.has_optimizer = any(_NOT_MODEL.fullmatch(key) for key in self._reader.tensors())

    def tensors(self) -> dict[str, TensorInfo]:
        """The model's tensors by their keys."""
        known = self._reader.tensors()
        return {name: known[key] for name, key in self._keys.items()}

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """See `TensorSource.read`."""
        return self._reader.read(self._keys[name], region)

    def config(self) -> dict[str, Any]:
        """See `TensorSource.config`; also has `padded_vocab_size`, the rows of the embedding."""
        shapes = {name: info.shape for name, info in self.tensors().items()}
        return our_sizes(shapes, self._args, self._given, str(self.path))

    def location(self, name: str) -> str:
        """How a tensor is stored."""
        return self._reader.location(self._keys[name])

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


def find_checkpoint(path: Path) -> Path:
    """The folder of a checkpoint: the given one, or the latest of a training run.

    Args:
        path: A checkpoint, or a folder of checkpoints with Megatron's tracker file.

    Raises:
        CheckpointError: There is none.
    """
    tracker = path / TRACKER_NAME
    if (path / BACKEND_NAME).is_file() or not tracker.is_file():
        return path
    latest = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if latest != "release" and not re.fullmatch(r"\d+", latest):
        raise CheckpointError(f"{tracker}: {latest!r:.40} is no iteration. Give the folder of the checkpoint itself.")
    return path / (latest if latest == "release" else f"iter_{int(latest):07d}")


def _check_backend(folder: Path) -> None:
    path = folder / BACKEND_NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder}: no {BACKEND_NAME}, which Megatron-Core writes last: no complete torch_dist checkpoint. "
            "Give the folder that has it, such as iter_0001000."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Copy the checkpoint again.") from error
    backend = {key: found.get(key) for key in BACKEND} if isinstance(found, dict) else found
    if backend != BACKEND:
        raise CheckpointError(
            f"{path}: {backend!r:.120}: only torch_dist, version 1, is read. "
            "Save the checkpoint again with --ckpt-format torch_dist."
        )


def _check_storage(folder: Path, metadata: Metadata) -> None:
    """Nothing is taken for granted: a path could lead out of the folder, a gap would leave a tensor unfilled."""
    storage: dict[Any, _StorageInfo] = metadata.storage_data
    problem = next(_file_problems(folder, storage.values()), None)
    for name, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            problem = problem or chunk_problem(name, tensor, storage)
    if problem is not None:
        raise CheckpointError(f"{folder / METADATA_NAME}: {problem}. Copy the checkpoint again.")


def _file_problems(folder: Path, storage: Iterable[_StorageInfo]) -> Iterator[str]:
    ends: dict[str, int] = {}
    for info in storage:
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = folder / name
        if not is_plain_name(name) or path.is_symlink():
            yield f"it refers to {name!r:.80}, which is no plain file of the folder"
        elif not path.is_file():
            yield f"it refers to the file {name!r:.80}, which is missing"
        elif path.stat().st_size < end:
            yield f"it refers to byte {end} of {name}, which has {path.stat().st_size}: the file is truncated"


def _model_keys(names: Iterable[str]) -> dict[str, str]:
    """The names that are offered → the keys in the files."""
    keys = [name for name in names if not _NOT_MODEL.fullmatch(name)]
    wrapped = bool(keys) and all(key.startswith(_WRAPPER) for key in keys)
    return {key.removeprefix(_WRAPPER) if wrapped else key: key for key in keys}
