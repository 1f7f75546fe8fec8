"""Megatron-Core's `torch_dist` as a place to stream tensors to, as its `dist_checkpointing.load` accepts them.

The load wants an entry for each state of Transformer Engine's modules (`_extra_state`), which keeps scales of 8-bit
formats. Written here is what a module in bf16 or fp32 has: an empty tensor.
"""

import io
import json
import re
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_framework.checkpoint.convert.base import TensorInfo
from moe_framework.checkpoint.convert.dcp_chunks import DEFAULT_FILE_BYTES, ChunkWriter
from moe_framework.checkpoint.convert.megatron_common import COMMON_KEY, common_bytes
from moe_framework.checkpoint.convert.megatron_sizes import megatron_args
from moe_framework.checkpoint.convert.megatron_source import BACKEND, BACKEND_NAME
from moe_framework.checkpoint.manifest import replace_durably, sync_folder

CHECKPOINT_VERSION = 3.0
_STACKED_LAYERS = re.compile(r"decoder\.layers\.(?!\d+\.)")
_STACKED_EXPERTS = re.compile(r".*\.mlp\.experts\.experts\.linear_fc[12]")
# Modules that are not Transformer Engine's, or keep no state in a GPTModel's checkpoint.
_STATELESS = re.compile(r"embedding\.word_embeddings|output_layer|.*\.mlp\.router")


class MegatronSink:
    """Writes a checkpoint for a GPTModel with Transformer Engine's layers; a `TensorSink`.

    Its tensors are those of `keymap_megatron.megatron_keymap(sizes)`. The vocabulary is written as it is: a model
    with padded embeddings loads it, since Megatron lets these tensors differ in size.

    Args:
        folder: An empty folder, which becomes the checkpoint.
        iteration: Training iterations done.
        max_file_bytes: Size at which a thread begins another file.
    """

    def __init__(self, folder: Path, *, iteration: int = 0, max_file_bytes: int = DEFAULT_FILE_BYTES):
        self._folder = folder
        self._iteration = iteration
        self._max_file_bytes = max_file_bytes
        self._writer: ChunkWriter | None = None
        self._config: dict[str, Any] = {}
        self._tensors: dict[str, TensorInfo] = {}

    def begin(self, tensors: dict[str, TensorInfo], config: dict[str, Any]) -> None:
        """See `TensorSink.begin`."""
        self._tensors, self._config = dict(tensors), dict(config)
        self._writer = ChunkWriter(self._folder, tensors, self._max_file_bytes)

    def write(self, name: str, offset: tuple[int, ...], part: Tensor) -> None:
        """See `TensorSink.write`."""
        self._open_writer().write(name, offset, part)

    def finish(self) -> None:
        """See `TensorSink.finish`; metadata.json, without which Megatron sees no checkpoint, comes last."""
        writer = self._open_writer()
        shapes = {name: info.shape for name, info in self._tensors.items()}
        writer.write_bytes(extra_state_keys(shapes), _saved([torch.empty(0, dtype=torch.uint8)]))
        state = {
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": self._iteration,
            # Tells Megatron how to name the tensors of the model that it is about to load.
            "content_metadata": {
                "singleton_local_shards": False,
                "non_homogeneous_layers": not any(_STACKED_LAYERS.match(name) for name in shapes),
            },
        }
        writer.write_bytes([COMMON_KEY], common_bytes(state, megatron_args(self._config)))
        writer.finish()
        sync_folder(self._folder)
        replace_durably(self._folder / BACKEND_NAME, json.dumps(BACKEND))

    def abort(self) -> None:
        """See `TensorSink.abort`."""
        if self._writer is not None:
            self._writer.abort()

    def _open_writer(self) -> ChunkWriter:
        assert self._writer is not None, "begin comes first"
        return self._writer


def extra_state_keys(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Keys of the `_extra_state` entries that the load of a GPTModel with these tensors asks for.

    A module that is stacked by layer or expert has one for each: `KEY/shard_LAYER.EXPERT_LAYERS.EXPERTS`.

    Args:
        shapes: Shape of each tensor, by Megatron's names.
    """
    keys: dict[str, None] = {}
    for name, shape in shapes.items():
        module = name.rpartition(".")[0]
        if _STATELESS.fullmatch(module):
            continue
        stacked = bool(_STACKED_LAYERS.match(name)) + bool(_STACKED_EXPERTS.fullmatch(module))
        counts = shape[:stacked] or (1,)
        for place in product(*map(range, counts)):
            keys[f"{module}._extra_state/shard_{_dotted(place)}_{_dotted(counts)}"] = None
    return list(keys)


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
