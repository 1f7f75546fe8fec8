"""Where a rank's part of a tensor lies in the stored tensor, whose shape is that of the unsharded model."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

# Ranks that share the width of experts have [E, 2, F, D], so that gate and up are split alike.
_GATE_AND_UP = ".experts.gate_up"


class Chunk(NamedTuple):
    """A block of a stored tensor.

    Attributes:
        place: Offsets and sizes in the stored tensor.
        values: The block, in shape `place.sizes`; shares the tensor's memory.
    """

    place: ChunkStorageMetadata
    values: Tensor


def stored_shape(name: str, tensor: Tensor) -> torch.Size:
    """Return the shape under which a tensor is stored: its global one, with gate and up as one dim."""
    shape = tensor.shape
    return torch.Size((shape[0], shape[1] * shape[2], shape[3])) if _is_split_in_width(name, tensor) else shape


def local_chunks(name: str, tensor: Tensor) -> list[Chunk]:
    """Describe this rank's part.

    Args:
        name: Global name.
        tensor: A DTensor, or a plain tensor that is whole.

    Returns:
        Its blocks; none where the rank is not in the tensor's mesh.
    """
    if not isinstance(tensor, DTensor):
        values = tensor.detach()
        return [Chunk(ChunkStorageMetadata(torch.Size([0] * values.dim()), values.shape), values)]
    if tensor.device_mesh.get_coordinate() is None:
        return []
    (place,) = tensor.__create_chunk_list__()
    values = tensor.to_local().detach()
    if not _is_split_in_width(name, tensor):
        return [Chunk(place, values)]
    (expert, half, row, column), sizes = place.offsets, place.sizes
    width = tensor.shape[2]
    sizes = torch.Size((sizes[0], *sizes[2:]))
    return [
        Chunk(ChunkStorageMetadata(torch.Size((expert, (half + part) * width + row, column)), sizes), values[:, part])
        for part in range(place.sizes[1])
    ]


def _is_split_in_width(name: str, tensor: Tensor) -> bool:
    return name.endswith(_GATE_AND_UP) and tensor.dim() == 4
