"""What a conversion will do, decided and checked before anything is written."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moe_framework.checkpoint.convert.base import CheckpointFile, TensorInfo, TensorSource
from moe_framework.checkpoint.convert.check import check_tensors
from moe_framework.checkpoint.convert.dcp_source import MODEL_PREFIX, OPTIMIZER_PREFIX, DcpSource
from moe_framework.checkpoint.convert.formats import DCP, keymap_of, open_checkpoint
from moe_framework.checkpoint.convert.hf_config import CONFIG_NAME, read_hf_config, sizes_of_hf
from moe_framework.checkpoint.convert.keymap import KeyMap
from moe_framework.checkpoint.convert.views import CastView, OurView, SelectedView, TheirView
from moe_framework.errors import CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Request:
    """What the user asks for.

    Attributes:
        source: The checkpoint to read.
        target: The folder to make.
        target_format: Its format.
        source_format: The source's; None to recognise it.
        dtype: Dtype of the weights; None for the source's.
        optimizer: Take the optimizer's state along.
        vocab_size: Rows of the vocabulary to keep; None for all.
        like: A folder whose config.json and tokenizer files the result gets; None for the source's.
        max_shard_bytes: Size of the result's files; None for 5 GB.
        allow_pickle: Read .bin files.
    """

    source: Path
    target: Path
    target_format: str
    source_format: str | None = None
    dtype: torch.dtype | None = None
    optimizer: bool = False
    vocab_size: int | None = None
    like: Path | None = None
    max_shard_bytes: int | None = None
    allow_pickle: bool = False


@dataclass(frozen=True)
class Plan:
    """A conversion that can begin.

    Attributes:
        request: What was asked for.
        source: The open source.
        source_format: Its format.
        sizes: The model's, of the target.
        source_map: From our names to the source's.
        target_map: From our names to the target's.
        tensors: The target's tensors, ready to be read under the target's names.
        optimizer: Names of optimizer tensors that are copied as they are.
        left_out: Tensors of the source that are not converted, each with the reason.
    """

    request: Request
    source: CheckpointFile
    source_format: str
    sizes: dict[str, Any]
    source_map: KeyMap
    target_map: KeyMap
    tensors: TensorSource
    optimizer: tuple[str, ...] = ()
    left_out: tuple[str, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of the target."""
        return sum(info.num_bytes for info in self.tensors.tensors().values())

    def sources_of(self, name: str) -> list[str]:
        """Names of the source's tensors that a tensor of the target is made of."""
        if name in self.optimizer:
            return [name]
        found: dict[str, None] = {}
        for link in self.target_map.by_theirs[name]:
            for other in self.source_map.by_ours[link.ours]:
                if other.within_ours(link.ours_region) is not None:
                    found[other.theirs] = None
        return list(found)


def make_plan(request: Request) -> Plan:
    """Open the source, and check everything that can be checked without reading its tensors.

    Args:
        request: What the user asks for.

    Returns:
        The plan; its source is open.

    Raises:
        CheckpointError: The source is damaged or not what its sizes need, or the request cannot be met.
    """
    source, kind = open_checkpoint(
        request.source, request.source_format, allow_pickle=request.allow_pickle, sizes=_known_sizes(request)
    )
    _check_request(request, kind)
    found = source.tensors()
    sizes = source.config()
    source_map = keymap_of(kind, sizes, found)
    if request.vocab_size is not None:
        sizes = _cropped(sizes, found, source_map, request.vocab_size)
        source_map = keymap_of(kind, sizes, found)
    left_out = check_tensors(source, source_map, str(request.source))
    ours: TensorSource = OurView(source, source_map)
    if request.dtype is not None:
        ours = CastView(ours, request.dtype)
    sizes = {key: value for key, value in sizes.items() if key != "padded_vocab_size"}
    target_map = keymap_of(request.target_format, sizes)
    tensors: TensorSource = TheirView(ours, target_map)
    optimizer = _optimizer_names(source, source_map) if request.optimizer else ()
    if optimizer:
        tensors = SelectedView(source, {name: name for name in (*tensors.tensors(), *optimizer)})
        left_out = [line for line in left_out if not line.startswith(OPTIMIZER_PREFIX)]
    return Plan(request, source, kind, sizes, source_map, target_map, tensors, optimizer, tuple(left_out))


def _known_sizes(request: Request) -> dict[str, Any]:
    """What the user tells of the model, for a source that does not."""
    sizes = {}
    if request.like is not None:
        path = request.like / CONFIG_NAME
        sizes = sizes_of_hf(read_hf_config(path), str(path))
    return sizes if request.vocab_size is None else {**sizes, "vocab_size": request.vocab_size}


def _check_request(request: Request, kind: str) -> None:
    if request.optimizer and (kind, request.target_format) != (DCP, DCP):
        raise CheckpointError(
            f"--optimizer: {kind} to {request.target_format} has no place for the optimizer's state, which would be "
            "lost. Leave --optimizer out to convert the weights alone."
        )
    if request.optimizer and (request.dtype is not None or request.vocab_size is not None):
        raise CheckpointError(
            "--optimizer: with --dtype or --vocab-size the weights would no longer be those that the moments belong "
            "to. Leave out one of them."
        )
    if kind == DCP and request.vocab_size is not None:
        raise CheckpointError(
            f"--vocab-size={request.vocab_size}: only the padding of another format's vocabulary can be left out; a "
            "step has the vocabulary that it was trained with. Leave --vocab-size out."
        )


def _cropped(sizes: dict[str, Any], found: dict[str, TensorInfo], keymap: KeyMap, vocab_size: int) -> dict[str, Any]:
    embedding = keymap.by_ours["embed.weight"][0].theirs
    rows = found[embedding].shape[0] if embedding in found and found[embedding].shape else 0
    if not 1 <= vocab_size <= rows:
        raise CheckpointError(f"--vocab-size={vocab_size} must be from 1 to {rows}, the rows of '{embedding}'.")
    return {**sizes, "vocab_size": vocab_size, "padded_vocab_size": rows}


def _optimizer_names(source: CheckpointFile, keymap: KeyMap) -> tuple[str, ...]:
    assert isinstance(source, DcpSource)
    found = source.tensors()
    own = tuple(name for name in found if name.startswith(OPTIMIZER_PREFIX))
    if not own:
        raise CheckpointError(f"--optimizer: {source.path} has no optimizer state. Leave --optimizer out.")
    wanted = {
        f"{OPTIMIZER_PREFIX}{moment}.{name.removeprefix(MODEL_PREFIX)}": shape
        for name, shape in keymap.theirs.items()
        for moment in _MOMENTS
    }
    problems = [f"'{name}' is missing." for name in wanted if name not in found]
    problems += [f"'{name}' is unexpected." for name in own if name not in wanted]
    problems += [
        f"'{name}' is {list(found[name].shape)}, its parameter {list(shape)}."
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    if problems:
        lines = "\n".join(f"{source.path}: {problem}" for problem in problems)
        raise CheckpointError(f"{lines} Leave --optimizer out to convert the weights alone. Nothing was written.")
    return own
