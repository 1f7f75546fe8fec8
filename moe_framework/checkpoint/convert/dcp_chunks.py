"""Writing DCP's files chunk by chunk, from several threads, without holding a tensor."""

import hashlib
import os
import pickle
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_framework.checkpoint.convert.base import TensorInfo
from moe_framework.checkpoint.manifest import FileEntry
from moe_framework.checkpoint.safe_pickle import METADATA_NAME
from moe_framework.checkpoint.verify import hash_file

DEFAULT_FILE_BYTES = 5 * 10**9


class ChunkWriter:
    """Writes tensors and entries of bytes as DCP's `.distcp` files and `.metadata`.

    Each thread appends to a file of its own, which it hashes on the way: nothing waits for anything.

    Args:
        folder: An empty folder.
        tensors: Every tensor that will come.
        max_file_bytes: Size at which a thread begins another file.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, TensorInfo], max_file_bytes: int = DEFAULT_FILE_BYTES):
        self._folder = folder
        self._tensors = dict(tensors)
        self._max_file_bytes = max_file_bytes
        self._chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in tensors}
        self._bytes_names: list[str] = []
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._lock = threading.Lock()
        self._current = threading.local()
        self._files: list[_HashedFile] = []

    def write(self, name: str, offset: tuple[int, ...], part: Tensor) -> None:
        """Append a box of a tensor as a chunk; see `TensorSink.write`.

        Raises:
            OSError: The file cannot be written.
        """
        if part.untyped_storage().nbytes() != part.nbytes:
            part = part.clone()  # torch.save writes whole storages
        file = self._file()
        start = file.size
        file.save(part)
        chunk = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=part.shape)
        info = _StorageInfo(relative_path=file.path.name, offset=start, length=file.size - start)
        with self._lock:
            self._chunks[name].append(chunk)
            self._storage[MetadataIndex(name, chunk.offsets)] = info

    def write_bytes(self, names: list[str], data: bytes) -> None:
        """Append bytes once, and enter them under one or more names.

        Raises:
            OSError: The file cannot be written.
        """
        file = self._file()
        info = _StorageInfo(relative_path=file.path.name, offset=file.size, length=len(data))
        file.write(data)
        with self._lock:
            self._bytes_names += names
            self._storage |= {MetadataIndex(name): info for name in names}

    def finish(self) -> dict[str, FileEntry]:
        """Write `.metadata`; every file is durable when this returns.

        Returns:
            Name of each file → size and checksum.

        Raises:
            OSError: A file cannot be written.
        """
        entries = {file.path.name: file.close() for file in self._files}
        path = self._folder / METADATA_NAME
        with path.open("wb") as stream:
            pickle.dump(self._metadata(), stream)
            stream.flush()
            os.fsync(stream.fileno())
        return {**entries, METADATA_NAME: hash_file(path)}

    def abort(self) -> None:
        """Close the files."""
        for file in self._files:
            file.discard()

    def _file(self) -> "_HashedFile":
        file = getattr(self._current, "file", None)
        if file is None or file.size >= self._max_file_bytes:
            with self._lock:
                file = _HashedFile(self._folder / f"__0_{len(self._files)}.distcp")
                self._files.append(file)
            self._current.file = file
        return file

    def _metadata(self) -> Metadata:
        tensors = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=info.dtype), size=torch.Size(info.shape), chunks=self._chunks[name]
            )
            for name, info in self._tensors.items()
        }
        return Metadata(
            state_dict_metadata={**tensors, **{name: BytesStorageMetadata() for name in self._bytes_names}},
            planner_data={},
            storage_data=self._storage,
            storage_meta=StorageMeta(),
        )


class _HashedFile:
    """A file that is written from front to back, with its checksum."""

    def __init__(self, path: Path):
        self.path = path
        self.size = 0
        self._stream = path.open("wb", buffering=0)
        self._digest = hashlib.sha256()
        self._error: OSError | None = None

    def save(self, tensor: Tensor) -> None:
        try:
            # torch.save needs no more of a file than `write` and `flush`.
            torch.save(tensor, cast(IO[bytes], self))
        except RuntimeError as error:
            # When `write` fails, torch still ends its archive, and raises what that finds instead.
            raise self._error or error from None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        done = 0
        try:
            while done < len(view):
                done += self._stream.write(view[done:])
        except OSError as error:
            self._error = error
            raise
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> FileEntry:
        os.fsync(self._stream.fileno())
        self._stream.close()
        return FileEntry(size=self.size, sha256=self._digest.hexdigest())

    def discard(self) -> None:
        self._stream.close()
