"""One optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_framework.data.loader import Batch
from moe_framework.distributed.collectives import all_reduce_sum, raise_together
from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.model.decoder import DecoderOutput
from moe_framework.optim.adamw import AdamW
from moe_framework.optim.clip import global_grad_norm
from moe_framework.parallel.fsdp import all_reduce_over_replicas


@dataclass(frozen=True)
class Objective:
    """The weights of the objective's terms.

    Attributes:
        aux_loss_coeff: Of each layer's load-balancing loss.
        z_loss_coeff: Of each layer's router z-loss.
    """

    aux_loss_coeff: float
    z_loss_coeff: float


class StepCounts(NamedTuple):
    """Counts of one step over all data ranks and micro-batches.

    Attributes:
        num_targets: Tokens with a loss; divides the cross entropy.
        num_tokens: Tokens that are not padding; divides the router losses.
        stop: Whether a rank was told to stop: the step is not to be done.
    """

    num_targets: int
    num_tokens: int
    stop: bool = False


class StepResult(NamedTuple):
    """What one step did, the same on every rank.

    Attributes:
        loss: Cross entropy, nats per target.
        aux_loss: Load-balancing loss per token, mean over layers; 1 when balanced.
        z_loss: Router z-loss per token, mean over layers.
        grad_norm: Global L2 norm before clipping.
        applied: Whether the parameters were updated; False when loss or norm were not finite.
        tokens_per_expert_LE: [L, E] int64 on the host, summed over all ranks.
        entropy_L: [L] float32 on the host, routing entropy summed over all tokens.
    """

    loss: float
    aux_loss: float
    z_loss: float
    grad_norm: float
    applied: bool
    tokens_per_expert_LE: Tensor
    entropy_L: Tensor


def agree_on_counts(
    batches: Sequence[Batch] | Exception, group: dist.ProcessGroup, *, copies: int = 1, stop: bool = False
) -> StepCounts:
    """Sum the step's counts over ranks before its first forward pass, and stop together if one has no data.

    Args:
        batches: This rank's micro-batches, or the error that its loader raised.
        group: The data ranks, or all ranks.
        copies: Ranks of the group that have the same batches: tp, where it is all ranks.
        stop: Whether this rank was told to stop.

    Returns:
        The global counts.

    Raises:
        DataError: On every rank, if the loader of any failed.

    Collective: `group`; every rank must call, also one whose loader failed.
    """
    error = batches if isinstance(batches, Exception) else None
    own = () if isinstance(batches, Exception) else batches
    # A host tensor, so that no GPU waits for it.
    totals = (sum(b.num_targets for b in own), sum(b.num_tokens for b in own), int(error is not None), int(stop))
    num_targets, num_tokens, num_failed, num_stops = all_reduce_sum(torch.tensor(totals), group).tolist()
    if num_failed:
        raise_together(error, group)
    return StepCounts(max(num_targets // copies, 1), max(num_tokens // copies, 1), stop=num_stops > 0)


def train_step(
    model: nn.Module,
    optimizer: AdamW,
    batches: Sequence[Batch],
    counts: StepCounts,
    *,
    mesh: ParallelMesh,
    objective: Objective,
    clip_norm: float,
) -> StepResult:
    """Forward and backward over the micro-batches, then one clipped update.

    The host waits for the device once, for all figures and before the update: nobody waits for the update itself.

    Args:
        model: The parallelised decoder.
        optimizer: Over its parameters.
        batches: This rank's micro-batches, on its device.
        counts: From `agree_on_counts`.
        mesh: The run's mesh.
        objective: Weights of the terms.
        clip_norm: Largest gradient norm; 0 for no clipping.

    Returns:
        The step's figures.

    Collective: the world; every rank must call.
    """
    totals = accumulate_gradients(model, batches, counts, objective)
    parameters = [p for p in model.parameters() if p.requires_grad]
    norm = global_grad_norm(parameters)
    scalars = torch.stack([totals.loss, totals.aux_loss, totals.z_loss])
    for sums in (scalars, totals.tokens_per_expert_LE, totals.entropy_L):
        all_reduce_sum(sums, mesh.world_group)
    scalars, tokens_per_expert_LE, entropy_L = _to_host(
        torch.cat([scalars, norm[None]]), totals.tokens_per_expert_LE, totals.entropy_L
    )
    loss, aux_loss, z_loss, grad_norm = scalars.tolist()
    applied = bool(torch.tensor([loss, aux_loss, z_loss, grad_norm]).isfinite().all())
    if applied:
        optimizer.step_clipped(norm, clip_norm)
    optimizer.zero_grad(set_to_none=True)
    num_layers = entropy_L.numel()
    return StepResult(
        loss=loss / counts.num_targets,
        aux_loss=aux_loss / counts.num_tokens / num_layers,
        z_loss=z_loss / counts.num_tokens / num_layers,
        grad_norm=grad_norm,
        applied=applied,
        tokens_per_expert_LE=tokens_per_expert_LE,
        entropy_L=entropy_L,
    )


def _to_host(*tensors: Tensor) -> list[Tensor]:
    """Copy small tensors to the host at once; through float64, which holds float32 and counts below 2^53 exactly."""
    flat = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.to(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def accumulate_gradients(
    model: nn.Module, batches: Sequence[Batch], counts: StepCounts, objective: Objective
) -> DecoderOutput:
    """Add the gradients of the step's objective into the parameters.

    The objective is Σ loss / targets + Σ (aux_coeff · aux + z_coeff · z) / tokens, with global counts below each
    sum, so that the gradients of ranks and micro-batches only have to be added. Each layer's router losses count
    with the full coefficient. Replicas of the model add theirs once, after the last micro-batch.

    Args:
        model: The parallelised decoder.
        batches: This rank's micro-batches, on its device.
        counts: Global counts of the step.
        objective: Weights of the terms.

    Returns:
        Sums over this rank's micro-batches, detached.

    Collective: the world; every rank must call with the same number of micro-batches.
    """
    outputs = []
    for index, batch in enumerate(batches):
        if len(batches) > 1:
            all_reduce_over_replicas(model, enabled=index == len(batches) - 1)
        output = forward(model, batch)
        routers = objective.aux_loss_coeff * output.aux_loss + objective.z_loss_coeff * output.z_loss
        (output.loss / counts.num_targets + routers / counts.num_tokens).backward()
        outputs.append([part.detach() for part in output[:-1]])
        del output, routers  # the micro-batch's graph, before the next one is built
    sums = [torch.stack(parts).sum(0) for parts in zip(*outputs, strict=True)]
    return DecoderOutput(*sums, logits_BSV=None)


def forward(model: nn.Module, batch: Batch) -> DecoderOutput:
    """Run the decoder on a micro-batch.

    Args:
        model: The decoder.
        batch: On the model's device.

    Returns:
        Its sums.

    Collective: the world; every rank must call.
    """
    return model(
        batch.tokens,
        batch.positions,
        batch.targets,
        document_ids_BS=batch.document_ids,
        valid_index_T=batch.valid_index,
    )
