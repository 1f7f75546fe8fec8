"""Initial weights that depend on the seed and the parameter's name alone, never on the layout.

Each parameter, and each expert of a stacked one, is drawn whole on the CPU from a generator of its own, one at a
time; the rank keeps its shard and drops the rest. So the same seed gives the same model on any number of ranks,
and no rank ever holds the model.
"""

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Projections that write into the residual stream: their variance would add up over the layers.
RESIDUAL_OUTPUTS = (".attention.o_proj.weight", ".moe.experts.down")
STACKED = (".moe.experts.gate_up", ".moe.experts.down")


@torch.no_grad()
def initialise(model: nn.Module, *, seed: int, init_std: float, num_layers: int) -> None:
    """Fill every parameter in place.

    Norms are ones; everything else is normal with `init_std`, and `init_std / sqrt(2 · num_layers)` for the
    projections into the residual stream.

    Source: GPT-2's scaled initialisation of residual layers (Radford et al. 2019, section 2.3).

    Args:
        model: A materialised model, sharded (DTensor) or not.
        seed: `train.seed`.
        init_std: Standard deviation.
        num_layers: Blocks of the model.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            local(parameter).fill_(1.0)
            continue
        std = init_std / math.sqrt(2 * num_layers) if name.endswith(RESIDUAL_OUTPUTS) else init_std
        _fill_normal(parameter, name=name, seed=seed, std=std)


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


def _fill_normal(parameter: Tensor, *, name: str, seed: int, std: float) -> None:
    shard = local(parameter)
    region = _local_region(parameter)
    if not name.endswith(STACKED):
        shard.copy_(_draw(parameter.shape, seed, name, 0, std)[region])
        return
    for row, expert in enumerate(range(*region[0].indices(parameter.shape[0]))):
        shard[row].copy_(_draw(parameter.shape[1:], seed, name, expert, std)[region[1:]])


def _local_region(parameter: Tensor) -> tuple[slice, ...]:
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _draw(shape: torch.Size, seed: int, name: str, expert: int, std: float) -> Tensor:
    digest = hashlib.sha256(f"{seed}|{name}|{expert}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
