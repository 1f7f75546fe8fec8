"""Megatron-Core's common state (arguments, iteration): a pickle, read without running anything.

Every class and function that it names is replaced by an inert stand-in, which keeps what it is given. A name that no
genuine checkpoint has is refused all the same, so that a crafted one is noticed.
"""

import io
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from moe_framework.errors import CheckpointError

COMMON_KEY = "common_state/shard_0_1"
LEGACY_NAME = "common.pt"
_LARGEST_PICKLE = 2**26
_BUILTINS = {"bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "slice"}
_ALLOWED = {
    "argparse": {"Namespace"},
    "types": {"SimpleNamespace"},
    "builtins": _BUILTINS,
    "__builtin__": _BUILTINS | {"xrange"},  # as protocol 2, which torch.save writes, spells them
    "_codecs": {"encode"},
    "_io": {"BytesIO"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_tensor_v3"},
    "torch.serialization": {"_get_layout"},
    "torch.storage": {"TypedStorage", "UntypedStorage"},
    "numpy": {"dtype", "ndarray"},
    "numpy.dtypes": {"UInt32DType"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
}
_ALLOWED_PACKAGES = ("megatron", "signal", "transformer_engine")


class _Inert:
    """Stands for an object or a function's result; keeps its state and does nothing."""

    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Items of a stand-in for a mapping are not needed."""

    def append(self, item: Any) -> None:
        """Nor those of a list."""


class _OrderedDict(dict[Any, Any]):
    pass


class _RefusedError(Exception):
    """The pickle names something that a genuine one does not."""


class _CommonUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _OrderedDict
        if _is_known(module, name):
            return type(name, (_Inert,), {"__module__": module})
        raise _RefusedError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return _Inert(pid)


def read_common(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """Read the common state of a checkpoint.

    Args:
        folder: The checkpoint.
        metadata: Its `.metadata`, checked.

    Returns:
        The state; `args`, where there is one, as a plain dict. Values that are not plain are inert objects.
        Empty if the checkpoint has no common state.

    Raises:
        CheckpointError: It names a class or function that no genuine checkpoint has, or is damaged; nothing was run.
    """
    storage: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data
    info = storage.get(MetadataIndex(COMMON_KEY))
    legacy = folder / LEGACY_NAME
    if legacy.is_file():
        return _read(legacy, 0, legacy.stat().st_size)
    return {} if info is None else _read(folder / info.relative_path, info.offset, info.length)


def common_bytes(state: Mapping[str, Any], args: Mapping[str, Any]) -> bytes:
    """The common state as Megatron-Core keeps it in its entry of bytes.

    Args:
        state: The state without `args`; plain values only.
        args: Megatron's arguments, which become its Namespace.
    """
    stream = io.BytesIO()
    torch.save([{**state, "args": Namespace(**args)}], stream)
    return stream.getvalue()


def _read(path: Path, offset: int, length: int) -> dict[str, Any]:
    where = f"{path}, byte {offset}: the common state"
    try:
        with path.open("rb") as stream:
            return _parse(_unpickle(stream, offset, length))
    except _RefusedError as error:
        raise CheckpointError(
            f"{where} is refused: it wants {error}, which no checkpoint needs and which may run code. Nothing was run. "
            "Do not use this checkpoint unless you know where it comes from."
        ) from error
    except Exception as error:  # a crafted or damaged archive may raise any type
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{where} cannot be read: {reason}. Nothing was run. Copy the checkpoint again."
        ) from error


def _unpickle(stream: IO[bytes], offset: int, length: int) -> Any:
    whole_file = offset == 0 and length == stream.seek(0, io.SEEK_END)
    stream.seek(offset)
    with zipfile.ZipFile(stream if whole_file else io.BytesIO(stream.read(length))) as archive:
        pickles = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is no archive of torch.save")
        if pickles[0].file_size > _LARGEST_PICKLE:
            raise ValueError(f"its pickle has {pickles[0].file_size} bytes")
        return _CommonUnpickler(io.BytesIO(archive.read(pickles[0]))).load()


def _parse(loaded: Any) -> dict[str, Any]:
    state = loaded[0] if isinstance(loaded, list) and loaded else loaded
    if not isinstance(state, dict):
        raise ValueError("it is not a dict")
    args = state.get("args")
    if isinstance(args, _Inert):
        args = args.state
    if args is not None and not isinstance(args, dict):
        raise ValueError("its args are no Namespace")
    return {**state, "args": dict(args or {})}


def _is_known(module: str, name: str) -> bool:
    if module.split(".")[0] in _ALLOWED_PACKAGES or name in _ALLOWED.get(module, ()):
        return True
    if module != "torch":
        return False
    return name in ("Size", "device") or name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)
