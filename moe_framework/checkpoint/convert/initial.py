"""Initial weights from a checkpoint of any format: each rank reads the boxes that its shards cover."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_framework.checkpoint.chunks import local_chunks, stored_shape
from moe_framework.checkpoint.convert.base import TensorInfo, TensorSource
from moe_framework.checkpoint.convert.boxes import parts
from moe_framework.checkpoint.convert.check import check_tensors
from moe_framework.checkpoint.convert.formats import keymap_of, open_checkpoint
from moe_framework.checkpoint.convert.views import OurView
from moe_framework.errors import CheckpointError

_READERS = 4


def open_weights(path: Path, known: Mapping[str, Any]) -> TensorSource:
    """Open a checkpoint under our names.

    Args:
        path: A folder in Hugging Face's, our or Megatron-Core's format.
        known: Sizes of the model that will be filled, for a format that does not tell all of its own.

    Returns:
        A source of our tensors; it has all of them.

    Raises:
        CheckpointError: It is missing, damaged, unsafe, or incomplete.
    """
    source, kind = open_checkpoint(path, sizes=known)
    keymap = keymap_of(kind, source.config(), source.tensors())
    check_tensors(source, keymap, str(path))
    return OurView(source, keymap)


def check_sizes(found: Mapping[str, Any], wanted: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    """Compare sizes of a checkpoint with a model's, also those that no tensor's shape shows.

    Args:
        found: The checkpoint's, as `TensorSource.config` returns them.
        wanted: The model's, by the same keys.
        keys: The keys to compare, where the checkpoint has them.
        where: The checkpoint, for the message.

    Raises:
        CheckpointError: They differ; the message has every difference, and the keys to set.
    """
    different = [key for key in keys if found.get(key) is not None and found[key] != wanted[key]]
    if different:
        lines = "\n".join(f"model.{key}={wanted[key]}: {where} has {found[key]}." for key in different)
        remedy = " ".join(f"model.{key}={str(found[key]).lower()}" for key in different)
        raise CheckpointError(f"{lines} Set {remedy}.")


def check_shapes(source: TensorSource, tensors: Mapping[str, Tensor], where: str) -> None:
    """Compare a checkpoint's tensors with those to be filled.

    Args:
        source: Of our tensors.
        tensors: The tensors to fill, by our names.
        where: The checkpoint, for the message.

    Raises:
        CheckpointError: Names or shapes differ; the message has every difference, one a line.
    """
    found = source.tensors()
    problems = [f"'{name}' is missing." for name in tensors if name not in found]
    problems += [f"'{name}' is not in the model." for name in found if name not in tensors]
    problems += [
        f"'{name}' is {list(found[name].shape)}, in the model {list(stored_shape(name, tensor))}."
        for name, tensor in tensors.items()
        if name in found and found[name].shape != tuple(stored_shape(name, tensor))
    ]
    if problems:
        lines = "\n".join(f"{where}: {problem}" for problem in problems)
        raise CheckpointError(f"{lines} Set model.* to the checkpoint's sizes.")


def fill_tensors(source: TensorSource, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors in place, cast to their dtypes; nothing outside of this rank's shards is read.

    Args:
        source: Of our tensors, with the shapes under which `tensors` are stored.
        tensors: DTensors of any layout, or plain tensors, by our names.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    with ThreadPoolExecutor(_READERS, thread_name_prefix="weights") as pool:
        for done in pool.map(lambda item: _fill(source, *item), tensors.items()):
            assert done is None


def _fill(source: TensorSource, name: str, tensor: Tensor) -> None:
    for place, values in local_chunks(name, tensor):
        if not values.numel():
            continue
        for part in parts(TensorInfo(tuple(place.sizes), tensor.dtype)):
            region = tuple(slice(box.start + at, box.stop + at) for box, at in zip(part, place.offsets, strict=True))
            values[part].copy_(source.read(name, region))
