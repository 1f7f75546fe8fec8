"""Safetensors files: the header, checked before it is believed, and written before the tensors are known.

The safetensors package writes a file only from tensors that are all in memory, and maps files when it reads.

Source: https://huggingface.co/docs/safetensors, "Format".
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_framework.checkpoint.convert.base import TensorInfo
from moe_framework.errors import CheckpointError

# In the order in which safetensors sorts them, which is the reverse of the order in the file.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RANK = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}
_LONGEST_HEADER = 100_000_000
_METADATA = "__metadata__"
_COPY = "Copy the file again from where it came."


@dataclass(frozen=True)
class Place:
    """A tensor inside a file.

    Attributes:
        info: Shape and dtype.
        begin: Position of its first byte in the file.
    """

    info: TensorInfo
    begin: int


def read_header(path: Path) -> dict[str, Place]:
    """Read which tensors a file has.

    Args:
        path: The file.

    Returns:
        Name → place; the places follow each other without gap to the end of the file.

    Raises:
        CheckpointError: The file is missing, truncated, or malformed.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(f"{path}: not a safetensors file, or truncated in its header. {_COPY}")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not JSON ({error}). {_COPY}") from error
    return _places(path, header, data_begin=8 + length, file_size=size)


def _places(path: Path, header: Any, *, data_begin: int, file_size: int) -> dict[str, Place]:
    places: dict[str, Place] = {}
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its header is not a table. {_COPY}")
    for name, entry in header.items():
        if name == _METADATA:
            continue
        try:
            dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            ok = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: '{name}' has no known dtype, shape and offsets ({error!r}).") from error
        if not ok or end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{path}: the size of '{name}' does not fit its shape and dtype. {_COPY}")
        places[name] = Place(TensorInfo(shape, dtype), data_begin + begin)
    end = data_begin
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].info.num_bytes)):
        if place.begin != end:
            raise CheckpointError(f"{path}: there is a gap or an overlap before '{name}'. {_COPY}")
        end += place.info.num_bytes
    if end != file_size:
        raise CheckpointError(f"{path}: {file_size} bytes, its header announces {end}: truncated or damaged. {_COPY}")
    return places


def make_header(tensors: Mapping[str, TensorInfo]) -> tuple[bytes, dict[str, Place]]:
    """Lay a file out as safetensors does: by descending dtype, then by name.

    Args:
        tensors: What the file will hold.

    Returns:
        The bytes before the data, and each tensor's place.

    Raises:
        CheckpointError: The format has no name for a dtype.
    """
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for name, info in sorted(tensors.items(), key=lambda item: (-_rank(*item), item[0])):
        offsets[name] = end
        end += info.num_bytes
        entries[name] = {
            "dtype": _NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: Place(tensors[name], len(header) + offset) for name, offset in offsets.items()}


def _rank(name: str, info: TensorInfo) -> int:
    if info.dtype not in _RANK:
        raise CheckpointError(f"'{name}' is {info.dtype}, which safetensors cannot hold. Give another with --dtype.")
    return _RANK[info.dtype]
