"""Copies of the tensors that a save writes, and the planner that tells DCP about them.

DCP's own stagers keep DTensors, whose meshes and streams a background thread would then touch. Here a staged
tensor is a plain local tensor with its place in the global one, so the thread needs neither a mesh nor a GPU.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from moe_framework.checkpoint.chunks import Chunk, local_chunks, stored_shape
from moe_framework.checkpoint.manifest import TensorEntry
from moe_framework.errors import CheckpointError


@dataclass(frozen=True)
class StagedTensor:
    """This rank's part of a tensor.

    Attributes:
        shape: Global shape.
        dtype: Of the values.
        chunks: The rank's blocks of it; none if this rank holds no part.
        sharded: False for a plain tensor, of which every rank has a replica.
    """

    shape: torch.Size
    dtype: torch.dtype
    chunks: list[Chunk]
    sharded: bool

    @property
    def entry(self) -> TensorEntry:
        """The tensor's line in the manifest."""
        return TensorEntry(shape=tuple(self.shape), dtype=dtype_name(self.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in the manifest, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def stage(tensors: Mapping[str, Tensor], *, copy: bool) -> dict[str, StagedTensor]:
    """Take hold of the values to save.

    Args:
        tensors: DTensors, and plain tensors that are the same on every rank.
        copy: Copy the values to CPU memory, so that the originals may change at once.

    Returns:
        The staged tensors by name. Without `copy` they share memory with the originals.

    Raises:
        ValueError: A tensor is on the meta device.
    """
    staged = {name: _stage_one(name, tensor, copy) for name, tensor in tensors.items()}
    if copy and any(tensor.is_cuda for tensor in tensors.values()):
        # The copies below are enqueued only; training may overwrite the originals once they are done.
        torch.cuda.current_stream().synchronize()
    return staged


def _stage_one(name: str, tensor: Tensor, copy: bool) -> StagedTensor:
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values to save")
    hold = _copy_to_cpu if copy else torch.Tensor.contiguous
    chunks = [Chunk(place, hold(values)) for place, values in local_chunks(name, tensor)]
    return StagedTensor(stored_shape(name, tensor), tensor.dtype, chunks, sharded=isinstance(tensor, DTensor))


def _copy_to_cpu(local: Tensor) -> Tensor:
    # Pinned memory needs an accelerator; torch keeps the pinned blocks for the next save.
    copy = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
    return copy.copy_(local, non_blocking=local.is_cuda)


class StagedSavePlanner(DefaultSavePlanner):
    """Plans the writing of staged tensors; replicas are written once, by the rank with the least to write."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """One write for each block that this rank holds."""
        self.plan = SavePlan(
            [
                _write_item(name, staged, chunk.place)
                for name, staged in self.state_dict.items()
                for chunk in staged.chunks
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The values that an item of the plan writes."""
        chunks: list[Chunk] = self.state_dict[index.fqn].chunks
        return next(chunk.values for chunk in chunks if chunk.place.offsets == index.offset)


def _write_item(name: str, staged: StagedTensor, place: ChunkStorageMetadata) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, place.offsets),
        type=WriteItemType.SHARD if staged.sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(chunk=place, properties=TensorProperties(dtype=staged.dtype), size=staged.shape),
    )


def check_ranks_agree(staged: Mapping[str, StagedTensor], group: dist.ProcessGroup | None) -> None:
    """Refuse to save tensors of which the ranks have different ideas.

    A shard that is passed as a plain tensor looks like a replica, and only one rank's would be written. So
    the values of plain tensors are compared too; where everything is a DTensor, this costs nothing.

    Args:
        staged: This rank's staged tensors.
        group: The store's group.

    Raises:
        CheckpointError: Names, shapes, dtypes or replicas differ; the same error on every rank.

    Collective: `group`; every rank must call.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    described = {name: _describe(tensor) for name, tensor in staged.items()}
    digest = hashlib.sha256(repr(sorted(described.items())).encode()).digest()
    digests: list[bytes] = [b""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) == 1:
        return
    tables: list[dict[str, str]] = [{} for _ in digests]
    dist.all_gather_object(tables, described, group=group)
    rank = next(rank for rank, table in enumerate(tables) if table != tables[0])
    first, other = tables[0], tables[rank]
    name = next(name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name))
    raise CheckpointError(
        f"'{name}' is {first.get(name, 'missing')} on rank 0, {other.get(name, 'missing')} on rank "
        f"{rank}. Pass a tensor that differs between ranks as a DTensor."
    )


def _describe(staged: StagedTensor) -> str:
    kind = "sharded" if staged.sharded else f"a replica with SHA-256 {_digest(staged.chunks[0].values)[:16]}"
    return f"{list(staged.shape)} {dtype_name(staged.dtype)} {kind}"


def _digest(local: Tensor) -> str:
    return hashlib.sha256(local.cpu().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
