"""Loss on the held-out region."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_framework.data.loader import Batch
from moe_framework.distributed.collectives import all_reduce_sum
from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.train.step import forward


class Measured(NamedTuple):
    """Sums over batches, the same on every rank.

    Attributes:
        loss_sum: Cross entropy in nats, summed over the targets.
        num_targets: Tokens with a loss.
        num_tokens: Tokens that are not padding.
        tokens_per_expert_LE: [L, E] int64 on the host, token copies that chose each expert; None without a batch.
        entropy_L: [L] float64 on the host, routing entropy in nats, summed over tokens; None without a batch.
    """

    loss_sum: float
    num_targets: int
    num_tokens: int
    tokens_per_expert_LE: Tensor | None
    entropy_L: Tensor | None

    @property
    def loss(self) -> float:
        """Nats per target; 0 without a target."""
        return self.loss_sum / max(self.num_targets, 1)


@torch.no_grad()
def measure(model: nn.Module, batches: Iterable[Batch], *, mesh: ParallelMesh, device: torch.device) -> Measured:
    """Sum cross entropy and routing over batches.

    Args:
        model: The parallelised decoder.
        batches: This rank's share; every rank has the same number, some perhaps without tokens.
        mesh: The run's mesh.
        device: This rank's device.

    Returns:
        The sums over all data ranks.

    Collective: the world; every rank must call.
    """
    # float64, so that the sum over a large region keeps its digits.
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    load_LE, entropy_L = None, None
    for batch in batches:
        output = forward(model, batch.to(device))
        totals[0] += output.loss
        totals[1] += batch.num_targets
        totals[2] += batch.num_tokens
        load_LE = output.tokens_per_expert_LE if load_LE is None else load_LE + output.tokens_per_expert_LE
        entropy_L = output.entropy_L.double() if entropy_L is None else entropy_L + output.entropy_L
    loss, num_targets, num_tokens = all_reduce_sum(totals, mesh.world_group).tolist()
    for sums in (load_LE, entropy_L):
        if sums is not None:
            all_reduce_sum(sums, mesh.world_group)
    # Each tp rank has its share of the loss and of the routed tokens, and has counted the same targets and tokens.
    copies = mesh.tp.size()
    return Measured(
        loss,
        round(num_targets / copies),
        round(num_tokens / copies),
        None if load_LE is None else load_LE.cpu(),
        None if entropy_L is None else entropy_L.cpu(),
    )
