"""Reading boxes of the tensors inside DCP's files, each of which is an archive of torch.save at some offset.

torch.load would read a whole chunk, which may be a stacked tensor of gigabytes, for each part of it. Here the
archive's table and its small pickle are read, without running anything, and then only the bytes of the box.
"""

import io
import math
import os
import pickle
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_framework.checkpoint.convert.base import Region, TensorInfo
from moe_framework.checkpoint.convert.boxes import read_box
from moe_framework.errors import CheckpointError

_LOCAL_HEADER_BYTES = 30
_LARGEST_PICKLE = 2**20
_STORAGE_DTYPES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_REBUILD = (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3"))


@dataclass(frozen=True)
class StoredItem:
    """A chunk as a file holds it.

    Attributes:
        info: Shape and dtype of the chunk.
        begin: Position of its first byte in the file; the chunk lies row-major from there on.
    """

    info: TensorInfo
    begin: int


def locate_item(descriptor: int, where: str, offset: int, length: int, expected: TensorInfo) -> StoredItem:
    """Find the bytes of a stored tensor.

    Args:
        descriptor: The file, open for reading.
        where: Names the file and the tensor, for messages.
        offset: Where the archive begins.
        length: Its size, in bytes.
        expected: What the metadata announces.

    Returns:
        Where the tensor's bytes are.

    Raises:
        CheckpointError: The archive is damaged, or holds anything but the one plain, contiguous tensor that is
            expected; nothing was run.
    """
    try:
        item = _locate(descriptor, offset, length)
    except Exception as error:  # a crafted or damaged archive may raise any type
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{where} is refused: {reason}. Nothing was run.") from error
    if item.info != expected:
        raise CheckpointError(
            f"{where} is {list(item.info.shape)} {item.info.dtype} in the file, "
            f"{list(expected.shape)} {expected.dtype} in .metadata."
        )
    return item


def read_item(descriptor: int, path: Path, item: StoredItem, region: Region | None = None) -> Tensor:
    """Read a box of a stored tensor.

    Args:
        descriptor: The file, open for reading.
        path: Its path, for messages.
        item: From `locate_item`.
        region: The box within the chunk; None for all of it.

    Raises:
        CheckpointError: The file cannot be read.
    """
    return read_box(descriptor, path, item.begin, item.info, region)


def _locate(descriptor: int, offset: int, length: int) -> StoredItem:
    with zipfile.ZipFile(io.BufferedReader(_Window(descriptor, offset, length))) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed, which torch.save never does")
        pickles = [entry for entry in archive.infolist() if entry.filename.endswith(".pkl")]
        if len(pickles) != 1 or pickles[0].file_size > _LARGEST_PICKLE:
            raise ValueError("an archive of one plain tensor has one small pickle")
        folder = pickles[0].filename.removesuffix("data.pkl")
        order = [entry for entry in archive.namelist() if entry == f"{folder}byteorder"]
        if order and archive.read(order[0]) != b"little":
            raise ValueError("its bytes are not little-endian")
        tensor = _read_pickle(archive.read(pickles[0]))
        data = archive.getinfo(f"{folder}data/{tensor.key}")
    if tensor.info.num_bytes and not _is_row_major(tensor):
        raise ValueError("its values do not lie row-major")
    begin = tensor.storage_offset * tensor.info.dtype.itemsize
    if begin + tensor.info.num_bytes > data.file_size:
        raise ValueError("its storage is smaller than the tensor")
    return StoredItem(tensor.info, offset + data.header_offset + _local_header(descriptor, offset, data) + begin)


def _is_row_major(tensor: "_Pickled") -> bool:
    shape = tensor.info.shape
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # The stride of a dim of size 1 means nothing, and torch keeps any there: that of the tensor it was cut from.
    return len(tensor.stride) == len(shape) and all(
        size == 1 or stride == wanted for size, stride, wanted in zip(shape, tensor.stride, strides, strict=True)
    )


def _local_header(descriptor: int, offset: int, entry: zipfile.ZipInfo) -> int:
    """Size of the header before an entry's bytes; its name and padding may differ from the table's."""
    window = _Window(descriptor, offset + entry.header_offset, _LOCAL_HEADER_BYTES)
    header = window.read(_LOCAL_HEADER_BYTES)
    if len(header) != _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise ValueError("its table points to no entry")
    return _LOCAL_HEADER_BYTES + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


class _Window(io.RawIOBase):
    """A part of an open file, as a file; several threads may have windows of one descriptor."""

    def __init__(self, descriptor: int, offset: int, length: int):
        self._file = descriptor
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("a position before the archive")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        count = os.preadv(self._file, [view], self._offset + self._at) if len(view) else 0
        self._at += count
        return count


@dataclass(frozen=True)
class _Pickled:
    info: TensorInfo
    key: str
    storage_offset: int
    stride: tuple[int, ...]


class _Inert:
    """Stands for a function or class of the pickle: keeps the arguments and does nothing."""

    def __init__(self, *args: Any):
        self.args = args


class _Rebuild(_Inert):
    pass


class _OrderedDict(dict[Any, Any]):
    """Backward hooks, of which a saved tensor has none."""


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REBUILD:
            return _Rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return _OrderedDict
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return type(name, (_Inert,), {})
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return type(name, (_Inert,), {"dtype": getattr(torch, name)})
        raise ValueError(f"it wants {module}.{name}, which no plain tensor needs")

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, key, _, _ = pid
        if kind != "storage" or not isinstance(key, str) or "/" in key:
            raise ValueError("it refers to something other than a storage")
        return _Inert(storage, key)


def _read_pickle(program: bytes) -> _Pickled:
    if any(opcode.name in ("EXT1", "EXT2", "EXT4", "BUILD") for opcode, _, _ in pickletools.genops(program)):
        raise ValueError("its pickle has opcodes that torch.save does not write for a plain tensor")
    loaded = _TensorUnpickler(io.BytesIO(program)).load()
    if type(loaded) is not _Rebuild:
        raise ValueError("it is not a plain tensor")
    storage, storage_offset, shape, stride = loaded.args[:4]
    kind, key = storage.args
    # The third version names the dtype, since its storage has none.
    dtype = loaded.args[6].dtype if len(loaded.args) > 6 else _STORAGE_DTYPES[kind.__name__]
    numbers = (storage_offset, *shape, *stride)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("its shape is not made of whole numbers")
    return _Pickled(TensorInfo(tuple(shape), dtype), key, storage_offset, tuple(stride))
