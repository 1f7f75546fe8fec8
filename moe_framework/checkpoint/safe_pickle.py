"""Reading DCP's `.metadata`, which is a pickle, without running anything.

The unpickler knows the few names that a genuine file contains, and gives an inert stand-in for each: neither a
class of torch nor a function is ever handed to the pickle. What comes out is then rebuilt, field by field.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_framework.checkpoint.manifest import RESTORE
from moe_framework.errors import CheckpointError

METADATA_NAME = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"


class _Inert:
    """Keeps what a pickle passes to a constructor or sets on an object, and does nothing."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any):
        self.args = args

    # Also keeps a pickle from setting attributes of these classes: unpickling calls it first.
    def __setstate__(self, state: Any) -> None:
        self.state = state


def _stand_in(name: str) -> type[_Inert]:
    return type(name, (_Inert,), {})


_STAND_INS: dict[tuple[str, str], type[_Inert]] = {
    (module, name): _stand_in(name)
    for module, name in (
        (_METADATA, "Metadata"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    )
}
_BY_NAME = {name: stand_in for (_, name), stand_in in _STAND_INS.items()}
_Dtype = _stand_in("dtype")


class _RefusedError(Exception):
    """The pickle names something that a genuine file does not."""


class _MalformedError(Exception):
    """The pickle is harmless but not DCP's."""


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        stand_in = _STAND_INS.get((module, name))
        if stand_in is not None:
            return stand_in
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return _Dtype(name)
        raise _RefusedError(f"{module}.{name}")


def read_metadata(step_dir: Path) -> Metadata:
    """Read a step's `.metadata`.

    Args:
        step_dir: The step's folder.

    Returns:
        Tensors with their chunks, and where each chunk is stored; built from plain numbers and strings only.

    Raises:
        CheckpointError: The file names a class that is not allowed, or is not DCP's.
    """
    path = step_dir / METADATA_NAME
    try:
        with path.open("rb") as stream:
            return _rebuild(_RestrictedUnpickler(stream).load())
    except _RefusedError as error:
        raise CheckpointError(
            f"{path}: refused: it wants {error}, which no checkpoint of tensors needs and which may run code. "
            "Nothing was run. Do not use this checkpoint unless you know where it comes from."
        ) from error
    except Exception as error:  # a damaged pickle may raise any type
        raise CheckpointError(f"{path}: not DCP metadata ({type(error).__name__}: {error}). {RESTORE}") from error


def _rebuild(loaded: Any) -> Metadata:
    fields = _fields("Metadata", loaded)
    tensors = _typed(fields.get("state_dict_metadata"), dict)
    storage = _typed(fields.get("storage_data"), dict)
    return Metadata(
        state_dict_metadata={_typed(name, str): _tensor(tensor) for name, tensor in tensors.items()},
        storage_data=dict(_storage_item(index, info) for index, info in storage.items()),
    )


def _tensor(value: Any) -> TensorStorageMetadata:
    fields = _fields("TensorStorageMetadata", value)
    properties = _instance("TensorProperties", fields.get("properties"))
    state = properties.state
    if not isinstance(state, tuple) or not state or type(state[0]) is not _Dtype:
        raise _MalformedError("a tensor has no dtype")
    chunks = _typed(fields.get("chunks"), list)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, state[0].args[0])),
        size=_size(fields.get("size")),
        chunks=[_chunk(chunk) for chunk in chunks],
    )


def _chunk(value: Any) -> ChunkStorageMetadata:
    fields = _fields("ChunkStorageMetadata", value)
    return ChunkStorageMetadata(offsets=_size(fields.get("offsets")), sizes=_size(fields.get("sizes")))


def _storage_item(index: Any, info: Any) -> tuple[MetadataIndex, _StorageInfo]:
    index_fields = _fields("MetadataIndex", index)
    info_fields = _fields("_StorageInfo", info)
    if info_fields.get("transform_descriptors") is not None:
        raise _MalformedError("a tensor is stored through a stream transform, which this format does not use")
    return (
        MetadataIndex(_typed(index_fields.get("fqn"), str), _size(index_fields.get("offset"))),
        _StorageInfo(
            relative_path=_typed(info_fields.get("relative_path"), str),
            offset=_natural(info_fields.get("offset")),
            length=_natural(info_fields.get("length")),
        ),
    )


def _size(value: Any) -> torch.Size:
    args = _instance("Size", value).args
    if len(args) != 1 or not isinstance(args[0], tuple):
        raise _MalformedError("a size is not a tuple")
    return torch.Size([_natural(number) for number in args[0]])


def _instance(name: str, value: Any) -> _Inert:
    if type(value) is not _BY_NAME[name]:
        raise _MalformedError(f"expected {name}, found {type(value).__name__}")
    return value


def _fields(name: str, value: Any) -> dict[Any, Any]:
    return _typed(_instance(name, value).state, dict)


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise _MalformedError(f"expected a whole number from 0 up, found {value!r:.40}")
    return value


def _typed[T](value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise _MalformedError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value
