"""DCP's reader and planner, closed to everything but plain tensors."""

import io
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from moe_framework.checkpoint.chunks import local_chunks
from moe_framework.checkpoint.convert.base import TensorInfo
from moe_framework.checkpoint.convert.boxes import parts
from moe_framework.checkpoint.convert.dcp_item import locate_item, read_item
from moe_framework.errors import CheckpointError


class TensorReader(FileSystemReader):
    """Reads tensors from a step's folder, from metadata that is already checked.

    The base class would unpickle `.metadata`, undo stream transforms and cast to the target's dtype, and it reads a
    whole chunk for each part: on N times as many ranks as saved the step, N times what they need.

    Args:
        step_dir: The step's folder.
        metadata: What `safe_pickle.read_metadata` returned and `verify.check_metadata` accepted.
    """

    def __init__(self, step_dir: Path, metadata: Metadata):
        super().__init__(step_dir)
        self._step_dir = step_dir
        self._metadata = metadata
        self._chunks = {
            MetadataIndex(name, chunk.offsets): TensorInfo(tuple(chunk.sizes), tensor.properties.dtype)
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata given at construction."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the plan's tensors in place, from their own bytes of the files.

        Raises:
            CheckpointError: What is stored is not the tensor that the metadata announces.
            OSError: A file cannot be opened.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            path = self._step_dir / name
            with path.open("rb", buffering=0) as stream:
                for item in items:
                    self._fill(stream.fileno(), path, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, descriptor: int, path: Path, item: ReadItem, planner: LoadPlanner) -> None:
        place: _StorageInfo = self.storage_data[item.storage_index]
        where = f"{path}: '{item.storage_index.fqn}'"
        stored = locate_item(descriptor, where, place.offset, place.length, self._chunks[item.storage_index])
        target = planner.resolve_tensor(item).detach()
        # Part by part, so that a large shard is not in memory twice.
        for part in parts(TensorInfo(tuple(item.lengths), stored.info.dtype)):
            region = tuple(
                slice(offset + cut.start, offset + cut.stop)
                for offset, cut in zip(item.storage_offsets, part, strict=True)
            )
            target[part].copy_(read_item(descriptor, path, stored, region))
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
