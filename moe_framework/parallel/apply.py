"""The one ordered recipe that spreads a model over ranks."""

import torch

from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.model.decoder import Decoder
from moe_framework.parallel.activation_checkpointing import apply_activation_checkpointing
from moe_framework.parallel.compile import compile_blocks
from moe_framework.parallel.ep import shard_experts
from moe_framework.parallel.fsdp import apply_fsdp
from moe_framework.parallel.tp import apply_tensor_parallel
from moe_framework.precision.policy import PrecisionPolicy


def apply_parallel(
    model: Decoder,
    mesh: ParallelMesh,
    *,
    device: torch.device,
    precision: PrecisionPolicy,
    activation_checkpointing: str = "none",
    compile_model: bool = False,
) -> None:
    """Spread a model on the meta device over the mesh, and allocate this rank's shards, uninitialised.

    Args:
        model: On the meta device, so that no rank ever holds it whole.
        mesh: The run's mesh.
        device: This rank's device.
        precision: Formats.
        activation_checkpointing: `none`, `selective` or `full`.
        compile_model: Whether to compile the parts without data-dependent shapes.

    Collective: the world; every rank must call.
    """
    apply_tensor_parallel(model, mesh)
    shard_experts(model, mesh)
    apply_activation_checkpointing(model, activation_checkpointing)
    if compile_model:
        compile_blocks(model)
    apply_fsdp(model, mesh, precision)
    model.to_empty(device=device)
