"""The global gradient norm over parameters on several meshes."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_framework.distributed.collectives import all_reduce_sum
from moe_framework.distributed.shards import local_part


@torch.no_grad()
def global_grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """L2 norm of all gradients together, each element counted once.

    Squares are summed locally, then over exactly the mesh axes along which a gradient is sharded: never over replicas.
    A rank whose experts got no token takes part with zeros.

    Args:
        parameters: The same on every rank, in the same order; those without a gradient count as zero.

    Returns:
        float32 scalar on the parameters' device, the same on every rank.

    Collective: every sharding axis of the parameters; every rank must call.
    """
    local_gradients: dict[tuple, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else ()
        local_gradients[key].append(local_part(gradient))
    squares = [_sum_of_squares(key, gradients) for key, gradients in local_gradients.items()]
    return torch.stack(squares).sum().sqrt()


def _sum_of_squares(key: tuple, gradients: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    total = torch.stack(norms).square().sum()
    if key:
        mesh, placements = key
        for axis, placement in enumerate(placements):
            # Not is_shard(): a shard of a shard, tp's and then FSDP's, is none by name.
            if not placement.is_replicate():
                all_reduce_sum(total, mesh.get_group(axis))
    return total
