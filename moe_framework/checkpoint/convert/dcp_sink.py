"""Our checkpoints as a place to stream tensors to: a step that training starts from, at any layout."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_framework import __version__
from moe_framework.checkpoint.convert.base import TensorInfo
from moe_framework.checkpoint.convert.dcp_chunks import DEFAULT_FILE_BYTES, ChunkWriter
from moe_framework.checkpoint.convert.dcp_source import COMPANION_PREFIX
from moe_framework.checkpoint.manifest import Manifest, TensorEntry, sync_folder, write_manifest
from moe_framework.checkpoint.staging import dtype_name
from moe_framework.checkpoint.verify import hash_file


class DcpSink:
    """Writes a step; a `TensorSink`.

    Each part is a chunk, so that a rank that loads the step reads little more than its shards.

    Args:
        folder: An empty folder, which becomes the step.
        state: The manifest's `state`.
        step: Optimizer steps done.
        companions: Hugging Face's files to keep in the step, by their own names.
        rank_states: The manifest's `rank_states`.
        max_file_bytes: Size at which a thread begins another file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        state: dict[str, Any],
        step: int = 0,
        companions: Mapping[str, Path] | None = None,
        rank_states: list[dict[str, Any]] | None = None,
        max_file_bytes: int = DEFAULT_FILE_BYTES,
    ):
        self._folder = folder
        self._state = state
        self._step = step
        self._companions = dict(companions or {})
        self._rank_states = rank_states or []
        self._max_file_bytes = max_file_bytes
        self._tensors: dict[str, TensorInfo] = {}
        self._writer: ChunkWriter | None = None

    def begin(self, tensors: dict[str, TensorInfo], config: dict[str, Any]) -> None:
        """See `TensorSink.begin`; the sizes are the caller's to put into `state`."""
        self._tensors = dict(tensors)
        self._writer = ChunkWriter(self._folder, tensors, self._max_file_bytes)

    def write(self, name: str, offset: tuple[int, ...], part: Tensor) -> None:
        """See `TensorSink.write`."""
        assert self._writer is not None, "begin comes first"
        self._writer.write(name, offset, part)

    def finish(self) -> None:
        """See `TensorSink.finish`; the manifest, without which there is no step, comes last."""
        assert self._writer is not None, "begin comes first"
        files = self._writer.finish()
        for name, source in self._companions.items():
            target = self._folder / (COMPANION_PREFIX + name)
            copy_durably(source, target)
            files[target.name] = hash_file(target)
        sync_folder(self._folder)
        manifest = Manifest(
            step=self._step,
            publication=1,
            tensors={name: TensorEntry(info.shape, dtype_name(info.dtype)) for name, info in self._tensors.items()},
            files=files,
            versions={"torch": torch.__version__, "moe_framework": __version__},
            state=self._state,
            rank_states=self._rank_states,
        )
        write_manifest(self._folder, manifest)

    def abort(self) -> None:
        """See `TensorSink.abort`."""
        if self._writer is not None:
            self._writer.abort()


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file's content to the disk.

    Args:
        source: The file.
        target: The copy.

    Raises:
        OSError: It cannot be copied.
    """
    shutil.copyfile(source, target)
    with target.open("rb") as stream:
        os.fsync(stream.fileno())
