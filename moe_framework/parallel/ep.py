"""Expert parallelism: each rank of the ep axis owns whole experts, or, with expert_tp, a slice of their width."""

from torch import nn
from torch.distributed.tensor import Shard

from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.moe.experts.layer import GroupedExperts
from moe_framework.parallel.tp import sharded_parameter


def shard_experts(model: nn.Module, mesh: ParallelMesh) -> None:
    """Turn each stacked expert weight into a DTensor that is split by expert over ep, also when ep = 1.

    Args:
        model: On the meta device.
        mesh: The run's mesh; ep divides the number of experts, and expert_tp their width.
    """
    for experts in model.modules():
        if not isinstance(experts, GroupedExperts):
            continue
        if mesh.expert_tp == 1:
            for name, weight in list(experts.named_parameters(recurse=False)):
                experts.register_parameter(name, sharded_parameter(weight, mesh.ep, (Shard(0),)))
        else:
            # Gate and up are split alike: [E, 2F, D] is seen as [E, 2, F, D], whose dim 2 is the width.
            both = mesh.root["ep", "tp"]
            gate_up = experts.gate_up.data.unflatten(1, (2, -1))
            experts.gate_up = sharded_parameter(gate_up, both, (Shard(0), Shard(2)))
            experts.down = sharded_parameter(experts.down, both, (Shard(0), Shard(2)))
