"""Loss on the held-out region."""

from collections.abc import Iterable

import torch
from torch import nn

from moe_framework.data.loader import Batch
from moe_framework.distributed.collectives import all_reduce_sum
from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.train.step import forward


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], *, mesh: ParallelMesh, device: torch.device) -> float:
    """Mean cross entropy over batches.

    Args:
        model: The parallelised decoder.
        batches: This rank's share; every rank has the same number, some perhaps without tokens.
        mesh: The run's mesh.
        device: This rank's device.

    Returns:
        Nats per target over all data ranks, the same on every rank.

    Collective: the world; every rank must call.
    """
    # float64, so that the sum over a large region keeps its digits.
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        totals[0] += forward(model, batch.to(device)).loss
        totals[1] += batch.num_targets
    # Each tp rank has its share of the loss, and has counted the same targets.
    loss, num_targets = all_reduce_sum(totals, mesh.world_group).tolist()
    return loss / max(num_targets / mesh.tp.size(), 1)
