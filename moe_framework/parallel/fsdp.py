"""Sharding of parameters, gradients and optimizer states with FSDP2.

Gradients are sums: every rank's loss is already divided by the global token count, so each unit, dense or expert,
adds up its gradients and divides by nothing. (Any other divide factor is applied twice by torch 2.11 when a shard
group has one rank.) What is summed over which ranks follows from the unit's mesh; see `distributed.mesh`. With model
replicas, a unit's mesh has two axes, and FSDP adds the shards' sums over the replicas, once for all micro-batches
of a step.

Where one rank holds an expert alone (dp_shard = 1 and one replica, as in EP over all GPUs), there is nothing to
gather: the experts stay out of FSDP and are cast where they are used. FSDP would copy every weight twice in each
direction and every gradient three times, for most of the model's parameters.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.model.block import Block
from moe_framework.model.decoder import Decoder
from moe_framework.parallel.tp import has_whole_kv_heads
from moe_framework.precision.policy import PrecisionPolicy


def apply_fsdp(model: Decoder, mesh: ParallelMesh, precision: PrecisionPolicy) -> None:
    """Make the embedding, each block's experts if ranks share them, its router, its rest, and the head one unit each.

    With tp > 1, what every tp rank uses whole is one unit more per block, over other ranks than the rest.

    Args:
        model: Its experts are DTensors on ep already, and what tp splits is on tp.
        mesh: The run's mesh.
        precision: Formats of gathered parameters and of gradient sums.

    Collective: the world; every rank must call.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute_dtype, reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False
    )

    exact = MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False)

    def shard(modules: nn.Module | list[nn.Module], on: DeviceMesh, *, mp_policy=policy, **options: Any) -> None:
        fully_shard(modules, mesh=mesh.replicated(on), mp_policy=mp_policy, **options)  # pyright: ignore[reportArgumentType]

    whole: set[nn.Parameter] = set()
    for block in model.layers:
        assert isinstance(block, Block)
        if mesh.expert.size() == mesh.num_replicas == 1:
            whole.update(block.moe.experts.parameters())
        else:
            # Inside an expert, never across experts: the split of dim 0 is expert parallelism's.
            shard(block.moe.experts, mesh.expert, shard_placement_fn=_inside_an_expert)
        # The router is gathered as its fp32 master: rounded to bf16, small updates would not change its choices.
        shard(block.moe.router, mesh.tokens, mp_policy=exact)
        if mesh.tp.size() > 1:
            shard(_used_whole(block, mesh), mesh.tokens)
        shard(block, mesh.dense, ignored_params=whole)
    # FSDP does not know where its part of a shard begins if both splits of the rows are uneven (torch 2.11).
    uneven = model.embed.num_embeddings % mesh.tp.size() > 0
    vocabulary: dict[str, Any] = {"shard_placement_fn": lambda _: Shard(1)} if uneven else {}
    if mesh.tp.size() > 1:
        shard(model.norm, mesh.tokens)
    if model.lm_head is not None:
        # A tied embedding is used at both ends, so it stays in the root's unit instead.
        shard(model.embed, mesh.dense, **vocabulary)
        shard([model.norm, model.lm_head] if mesh.tp.size() == 1 else model.lm_head, mesh.dense, **vocabulary)
    shard(model, mesh.dense, ignored_params=whole, **vocabulary)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def all_reduce_over_replicas(model: nn.Module, *, enabled: bool) -> None:
    """Choose whether the next backward passes add gradients over the model's replicas, or keep them for a later one.

    While it is off, each rank keeps the sums over its own replica's shards, in the format of gradient sums, and no
    parameter gets its gradient; the next pass with it on adds them up. Without replicas it changes nothing.

    Args:
        model: From `apply_fsdp`, or a plain one, which has no replicas.
        enabled: On, or off.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(enabled)


def _inside_an_expert(parameter: nn.Parameter) -> Shard:
    """Split [E, 2F, D] and [E, D, F] in dim 1; [E, 2, F, D], whose width tp splits, in its width."""
    return Shard(1 if parameter.ndim == 3 else 2)


def _used_whole(block: Block, mesh: ParallelMesh) -> list[nn.Module]:
    """What each tp rank of a block uses whole, beside the router; the first to run stands first, the last last."""
    attention = block.attention
    parts = [attention.k_proj, attention.v_proj] if has_whole_kv_heads(attention, mesh) else []
    norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    return [block.attention_norm, *parts, *norms, block.moe_norm]
