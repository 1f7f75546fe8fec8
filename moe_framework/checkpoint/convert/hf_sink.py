"""A Hugging Face folder as a place to stream tensors to: files whose layout is known before the tensors are."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_framework.checkpoint.convert.base import TensorInfo
from moe_framework.checkpoint.convert.boxes import bytes_of
from moe_framework.checkpoint.convert.dcp_sink import copy_durably
from moe_framework.checkpoint.convert.hf_config import CONFIG_NAME, hf_config_of, read_hf_config
from moe_framework.checkpoint.convert.hf_source import INDEX_NAME, SINGLE_NAME, read_weight_map
from moe_framework.checkpoint.convert.safetensors_file import Place, make_header
from moe_framework.checkpoint.manifest import replace_durably, sync_folder

DEFAULT_SHARD_BYTES = 5 * 10**9
_GENERATION_NAME = "generation_config.json"


class HfSink:
    """Writes safetensors, their index and what describes the model; a `TensorSink`.

    Args:
        folder: An empty folder.
        companions: Files that describe the model, by name, such as its tokenizer; their config.json is the template
            of the new one, and their index is followed where it names the same tensors.
        max_shard_bytes: Largest sum of the tensors of one file; a larger tensor has a file of its own. None for
            the files of the companions' index, or else for 5 GB.
    """

    def __init__(self, folder: Path, *, companions: Mapping[str, Path], max_shard_bytes: int | None = None):
        self._folder = folder
        self._companions = dict(companions)
        self._max_shard_bytes = max_shard_bytes
        self._tensors: dict[str, TensorInfo] = {}
        self._files: dict[str, str] = {}
        self._places: dict[str, Place] = {}
        self._descriptors: dict[str, int] = {}
        self._config_text = ""

    def begin(self, tensors: dict[str, TensorInfo], config: dict[str, Any]) -> None:
        """See `TensorSink.begin`."""
        self._tensors = dict(tensors)
        self._config_text = self._make_config(config)
        self._files = self._assign_files()
        for file in dict.fromkeys(self._files.values()):
            own = {name: tensors[name] for name, other in self._files.items() if other == file}
            header, places = make_header(own)
            descriptor = os.open(self._folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            self._descriptors[file] = descriptor
            _write_at(descriptor, memoryview(header), 0)
            self._places |= places

    def write(self, name: str, offset: tuple[int, ...], part: Tensor) -> None:
        """See `TensorSink.write`."""
        info, begin = self._places[name].info, self._places[name].begin
        index = 0
        for place, size in zip(offset, info.shape, strict=True):
            index = index * size + place
        _write_at(self._descriptors[self._files[name]], bytes_of(part), begin + index * info.dtype.itemsize)

    def finish(self) -> None:
        """See `TensorSink.finish`."""
        while self._descriptors:
            _, descriptor = self._descriptors.popitem()
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        for name, source in self._companions.items():
            if name not in (CONFIG_NAME, INDEX_NAME):
                copy_durably(source, self._folder / name)
        if _GENERATION_NAME not in self._companions:
            replace_durably(self._folder / _GENERATION_NAME, '{\n  "_from_model_config": true\n}\n')
        if set(self._files.values()) != {SINGLE_NAME}:
            replace_durably(self._folder / INDEX_NAME, self._make_index())
        replace_durably(self._folder / CONFIG_NAME, self._config_text)
        sync_folder(self._folder)

    def abort(self) -> None:
        """See `TensorSink.abort`."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _make_config(self, sizes: dict[str, Any]) -> str:
        path = self._companions.get(CONFIG_NAME)
        template = None if path is None else read_hf_config(path)
        config = hf_config_of(sizes, _main_dtype(self._tensors), template)
        if path is not None and config == template:
            return path.read_text(encoding="utf-8")
        return json.dumps(config, indent=2, sort_keys=True) + "\n"

    def _assign_files(self) -> dict[str, str]:
        index = self._companions.get(INDEX_NAME)
        if self._max_shard_bytes is None and index is not None:
            weight_map = read_weight_map(index)
            if weight_map.keys() == self._tensors.keys() and all(
                f.endswith(".safetensors") for f in weight_map.values()
            ):
                return weight_map
        limit = self._max_shard_bytes or DEFAULT_SHARD_BYTES
        shards: list[list[str]] = []
        filled = limit
        for name, info in self._tensors.items():
            if filled + info.num_bytes > limit or not shards:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += info.num_bytes
        if len(shards) == 1:
            return dict.fromkeys(shards[0], SINGLE_NAME)
        return {
            name: f"model-{number:05}-of-{len(shards):05}.safetensors"
            for number, names in enumerate(shards, start=1)
            for name in names
        }

    def _make_index(self) -> str:
        metadata = {
            "total_parameters": sum(torch.Size(info.shape).numel() for info in self._tensors.values()),
            "total_size": sum(info.num_bytes for info in self._tensors.values()),
        }
        return json.dumps({"metadata": metadata, "weight_map": self._files}, indent=2, sort_keys=True) + "\n"


def _main_dtype(tensors: Mapping[str, TensorInfo]) -> torch.dtype:
    """The dtype of most bytes."""
    sizes: dict[torch.dtype, int] = {}
    for info in tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.num_bytes
    return max(sizes, key=sizes.__getitem__, default=torch.float32)


def _write_at(descriptor: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + 2**30], at + done)
