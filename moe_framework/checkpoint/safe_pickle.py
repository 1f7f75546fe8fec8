"""Reading DCP's `.metadata`, which is a pickle, without running anything.

The unpickler knows the few names that a genuine file contains, and gives an inert stand-in for each: neither a
class of torch nor a function is ever handed to the pickle. What comes out is then rebuilt, field by field.
"""

import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
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
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"


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
# What Megatron-Core's checkpoints name besides: entries of bytes, the plan of a save that it means to reuse, and the
# folder, if the caller gave a Path.
_MEGATRON_STAND_INS: dict[tuple[str, str], type[_Inert]] = _STAND_INS | {
    (module, name): _stand_in(name)
    for module, name in (
        (_METADATA, "BytesStorageMetadata"),
        (_PLANNER, "SavePlan"),
        (_PLANNER, "WriteItem"),
        (_PLANNER, "WriteItemType"),
        (_PLANNER, "TensorWriteData"),
        (_MEGATRON, "MCoreMetadata"),
        (_MEGATRON, "MCoreSavePlan"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
    )
}
_BY_NAME = {name: stand_in for (_, name), stand_in in _MEGATRON_STAND_INS.items()}
_Dtype = _stand_in("dtype")


class _RefusedError(Exception):
    """The pickle names something that a genuine file does not."""


class _MalformedError(Exception):
    """The pickle is harmless but not DCP's."""


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], stand_ins: dict[tuple[str, str], type[_Inert]]):
        super().__init__(stream)
        self._stand_ins = stand_ins

    def find_class(self, module: str, name: str) -> Any:
        stand_in = self._stand_ins.get((module, name))
        if stand_in is not None:
            return stand_in
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return _Dtype(name)
        raise _RefusedError(f"{module}.{name}")


def read_metadata(step_dir: Path, *, allow_bytes: bool = False) -> Metadata:
    """Read a step's `.metadata`.

    Args:
        step_dir: The step's folder.
        allow_bytes: Accept what Megatron-Core writes besides tensors: entries of bytes, whose content stays unread.

    Returns:
        Tensors with their chunks, and where each chunk is stored; built from plain numbers and strings only.

    Raises:
        CheckpointError: The file names a class that is not allowed, or is not DCP's.
    """
    path = step_dir / METADATA_NAME
    try:
        with path.open("rb") as stream:
            loaded = _RestrictedUnpickler(stream, _MEGATRON_STAND_INS if allow_bytes else _STAND_INS).load()
            return _rebuild(loaded, allow_bytes)
    except _RefusedError as error:
        raise CheckpointError(
            f"{path}: refused: it wants {error}, which no checkpoint of tensors needs and which may run code. "
            "Nothing was run. Do not use this checkpoint unless you know where it comes from."
        ) from error
    except Exception as error:  # a damaged pickle may raise any type
        raise CheckpointError(f"{path}: not DCP metadata ({type(error).__name__}: {error}). {RESTORE}") from error


def _rebuild(loaded: Any, allow_bytes: bool) -> Metadata:
    fields = _fields("Metadata", loaded)
    tensors = _typed(fields.get("state_dict_metadata"), dict)
    storage = _typed(fields.get("storage_data"), dict)
    return Metadata(
        state_dict_metadata={_typed(name, str): _entry(entry, allow_bytes) for name, entry in tensors.items()},
        storage_data=dict(_storage_item(index, info, allow_bytes) for index, info in storage.items()),
    )


def _entry(value: Any, allow_bytes: bool) -> TensorStorageMetadata | BytesStorageMetadata:
    if allow_bytes and type(value) is _BY_NAME["BytesStorageMetadata"]:
        return BytesStorageMetadata()
    return _tensor(value)


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


def _storage_item(index: Any, info: Any, allow_bytes: bool) -> tuple[MetadataIndex, _StorageInfo]:
    index_fields = _fields("MetadataIndex", index)
    offset = index_fields.get("offset")
    info_fields = _fields("_StorageInfo", info)
    if info_fields.get("transform_descriptors") is not None:
        raise _MalformedError("a tensor is stored through a stream transform, which this format does not use")
    return (
        MetadataIndex(
            _typed(index_fields.get("fqn"), str),
            None if offset is None and allow_bytes else _size(offset),  # bytes have no place in a tensor
        ),
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
