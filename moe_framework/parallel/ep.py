"""Expert parallelism: each rank of the ep axis owns whole experts."""

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.moe.experts.layer import GroupedExperts


def shard_experts(model: nn.Module, mesh: ParallelMesh) -> None:
    """Turn each stacked expert weight into a DTensor that is split by expert over ep, also when ep = 1.

    Args:
        model: On the meta device.
        mesh: The run's mesh; ep divides the number of experts.
    """
    ep = mesh.ep
    for experts in model.modules():
        if not isinstance(experts, GroupedExperts):
            continue
        for name, weight in list(experts.named_parameters(recurse=False)):
            local = weight.data.new_empty(weight.shape[0] // ep.size(), *weight.shape[1:])
            dtensor = DTensor.from_local(local, ep, [Shard(0)], run_check=False)
            experts.register_parameter(name, nn.Parameter(dtensor))
