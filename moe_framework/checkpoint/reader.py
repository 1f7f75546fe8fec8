"""DCP's reader and planner, closed to everything but plain tensors."""

import io
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from moe_framework.checkpoint.chunks import local_chunks
from moe_framework.errors import CheckpointError


class TensorReader(FileSystemReader):
    """Reads tensors from a step's folder, from metadata that is already checked.

    The base class would unpickle `.metadata`, undo stream transforms and cast to the target's dtype.

    Args:
        step_dir: The step's folder.
        metadata: What `safe_pickle.read_metadata` returned and `verify.check_metadata` accepted.
    """

    def __init__(self, step_dir: Path, metadata: Metadata):
        super().__init__(step_dir)
        self._step_dir = step_dir
        self._metadata = metadata
        self._expected: dict[MetadataIndex, tuple[torch.Size, torch.dtype]] = {
            MetadataIndex(name, chunk.offsets): (chunk.sizes, tensor.properties.dtype)
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata given at construction."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the plan's tensors in place.

        Raises:
            CheckpointError: What is stored is not the tensor that the metadata announces.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with (self._step_dir / name).open("rb") as stream:
                for item in items:
                    self._fill(stream, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, stream: io.BufferedReader, item: ReadItem, planner: LoadPlanner) -> None:
        info: _StorageInfo = self.storage_data[item.storage_index]
        size, dtype = self._expected[item.storage_index]
        stream.seek(info.offset)
        where = f"{self._step_dir / info.relative_path}: '{item.storage_index.fqn}'"
        stored = _load_tensor(stream.read(info.length), where)
        if stored.shape != size or stored.dtype != dtype:
            raise CheckpointError(
                f"{where} is {list(stored.shape)} {stored.dtype} in the file, {list(size)} {dtype} in .metadata."
            )
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            stored = stored.narrow(dim, offset, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(stored)
        planner.commit_tensor(item, target)


class TensorLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of a flat dict of tensors; has no way to read pickled objects."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        """Reads for each block that this rank holds of the tensors to fill, all of which the metadata has."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, tensor in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            places = [chunk.place for chunk in local_chunks(name, tensor)]
            items += create_read_items_for_chunk_list(name, stored, places)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The block of this rank that a read fills."""
        chunks = local_chunks(index.fqn, self.state_dict[index.fqn])
        return next(chunk.values for chunk in chunks if chunk.place.offsets == index.offset)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse: the base class unpickles here.

        Raises:
            CheckpointError: Always.
        """
        raise CheckpointError(f"'{read_item.dest_index.fqn}' is stored as bytes, not as a tensor; nothing was read.")


def _load_tensor(data: bytes, where: str) -> Tensor:
    try:
        _check_globals(data)
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a crafted or damaged file may raise any type
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{where} is refused: {reason}. Nothing was run.") from error
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        raise CheckpointError(f"{where} is refused: it is not a plain tensor. Nothing was run.")
    return tensor


def _check_globals(data: bytes) -> None:
    """Refuse a stored tensor that needs more than torch.save writes for a plain one.

    `weights_only` is what keeps code from running. It also admits what libraries have registered as safe, such as
    DTensor's meshes, whose constructors communicate.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed, which torch.save never does")
        pickles = [name for name in archive.namelist() if name.endswith(".pkl")]
        if len(pickles) != 1:
            raise ValueError(f"{len(pickles)} pickles where one is expected")
        program = archive.read(pickles[0])
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"):
            raise ValueError(f"the opcode {opcode.name}, which torch.save does not write")
        if opcode.name == "GLOBAL" and not _is_needed(str(argument)):
            raise ValueError(f"it wants {str(argument).replace(' ', '.')}, which no plain tensor needs")


def _is_needed(name: str) -> bool:
    if name in ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", "collections OrderedDict"):
        return True
    module, _, attribute = name.partition(" ")
    return module in ("torch", "torch.storage") and (
        attribute.endswith("Storage") or isinstance(getattr(torch, attribute, None), torch.dtype)
    )
