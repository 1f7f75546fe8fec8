"""Sharding of parameters, gradients and optimizer states with FSDP2.

Gradients are sums: every rank's loss is already divided by the global token count, so each unit, dense or expert,
adds up its gradients and divides by nothing. (Any other divide factor is applied twice by torch 2.11 when a shard
group has one rank.)

Where one rank holds an expert alone (dp_shard = 1, as in EP over all GPUs), there is nothing to gather: the experts
stay out of FSDP and are cast where they are used. FSDP would copy every weight twice in each direction and every
gradient three times, for most of the model's parameters.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.model.block import Block
from moe_framework.model.decoder import Decoder
from moe_framework.precision.policy import PrecisionPolicy


def apply_fsdp(model: Decoder, mesh: ParallelMesh, precision: PrecisionPolicy) -> None:
    """Make the embedding, each block's experts if ranks share them, its router, its rest, and the head one unit each.

    Args:
        model: Its experts are DTensors on ep already.
        mesh: The run's mesh.
        precision: Formats of gathered parameters and of gradient sums.

    Collective: the world; every rank must call.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute_dtype, reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False
    )

    exact = MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False)

    def shard(modules: nn.Module | list[nn.Module], on: DeviceMesh, *, mp_policy=policy, **options) -> None:
        fully_shard(modules, mesh=on, mp_policy=mp_policy, **options)  # pyright: ignore[reportArgumentType]

    whole: set[nn.Parameter] = set()
    for block in model.layers:
        assert isinstance(block, Block)
        if mesh.expert.size() == 1:
            whole.update(block.moe.experts.parameters())
        else:
            # Inside an expert, never across experts: the split of dim 0 is expert parallelism's.
            shard(block.moe.experts, mesh.expert, shard_placement_fn=lambda _: Shard(1))
        # The router is gathered as its fp32 master: rounded to bf16, small updates would not change its choices.
        shard(block.moe.router, mesh.dense, mp_policy=exact)
        shard(block, mesh.dense, ignored_params=whole)
    if model.lm_head is not None:
        # A tied embedding is used at both ends, so it stays in the root's unit instead.
        shard(model.embed, mesh.dense)
        shard([model.norm, model.lm_head], mesh.dense)
    shard(model, mesh.dense, ignored_params=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
