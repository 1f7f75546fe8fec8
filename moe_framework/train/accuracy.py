"""How often the most likely next token is the right one, counted where the loss is computed."""

from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from moe_framework.distributed.collectives import all_reduce, all_reduce_sum
from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.model.decoder import Decoder

_NO_TOKEN = torch.iinfo(torch.int64).max


class AccuracyCounter:
    """Counts while the block runs: the logits of a batch are seen on their way to the loss, and never kept.

    Args:
        model: The parallelised decoder.
        mesh: The run's mesh.
        device: This rank's device.
    """

    def __init__(self, model: Decoder, mesh: ParallelMesh, device: torch.device):
        self._model = model
        self._mesh = mesh
        self._loss = model.cross_entropy_sum
        self._group = mesh.tp_group if mesh.tp.size() > 1 else None
        self._num_correct = torch.zeros((), dtype=torch.int64, device=device)

    def __enter__(self) -> Self:
        """Begin to count."""
        self._model.cross_entropy_sum = self._count_and_compute
        return self

    def __exit__(self, *_: object) -> None:
        """Count no longer."""
        self._model.cross_entropy_sum = self._loss

    def take(self) -> int:
        """Return the count over all ranks since the last call.

        Collective: the world; every rank must call.
        """
        total = int(all_reduce_sum(self._num_correct, self._mesh.world_group).item())
        self._num_correct.zero_()
        return total // self._mesh.tp.size()  # the ranks of a tp group have counted the same

    def _count_and_compute(self, logits: Tensor, targets: Tensor) -> Tensor:
        first_row = self._model.embed.first_row or 0
        self._num_correct += num_correct(logits, targets, first_row=first_row, group=self._group)
        return self._loss(logits, targets)


def num_correct(
    logits_BSv: Tensor, targets_BS: Tensor, *, first_row: int = 0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Count the targets that have the largest logit; of equal ones, the first token's counts as the largest.

    Args:
        logits_BSv: [B, S, v] in the compute dtype; of this rank's part of the vocabulary.
        targets_BS: [B, S] int64; negative where there is none.
        first_row: Number of the first token of this rank's part.
        group: The ranks that share the vocabulary; None for one that is here whole.

    Returns:
        int64 scalar, the same on every rank of the group.

    Collective: `group`; every rank must call.
    """
    largest_BS, token_BS = logits_BSv.max(-1)
    token_BS = token_BS + first_row
    if group is not None:
        limit_BS = all_reduce(largest_BS.float(), "max", group)
        token_BS = torch.where(largest_BS == limit_BS, token_BS, _NO_TOKEN)
        token_BS = all_reduce(token_BS, "min", group)
    return (token_BS == targets_BS).sum()
