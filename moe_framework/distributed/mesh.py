"""The one mesh of a run, and the groups derived from it.

The root mesh has the axes (dp_replicate, dp_shard, ep, tp), tp varying fastest. A data rank is one
(dp_replicate, dp_shard, ep) coordinate: it has its own sequences, which its tp ranks share.

Where a parameter is sharded, and which ranks' gradients are summed, follows from who computes with it:

    what                                  its tp shards    sharded and summed over       `ParallelMesh`
    projections, embedding, head          tp               dp_shard × ep                 dense
    norms, router                         none             dp_shard × ep × tp            tokens
    experts (whole ones over ep)          none             dp_shard × tp                 expert
    experts with expert_tp = tp           tp (width)       dp_shard                      expert

Each tp rank has tokens of its own between attention layers, so what is used whole there is summed over tp too. With
model replicas, the same sums go over dp_replicate.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("dp_replicate", "dp_shard", "ep", "tp")


@dataclass(frozen=True)
class ParallelMesh:
    """The root mesh and what is derived from it; made once, passed to whatever needs it.

    Attributes:
        root: All ranks, with the axes of `AXES`.
        dense: The ranks that share the parameters which tp splits: dp_shard×ep, flattened.
        tokens: The ranks that share the parameters which every tp rank uses whole: dp_shard×ep×tp, flattened.
        expert: The ranks that share one expert's parameters, or one slice of its width: dp_shard×tp, flattened, or
            dp_shard where tp splits the experts.
        data: The ranks with different sequences: dp_replicate×dp_shard×ep, flattened.
        world: All ranks, flattened.
        expert_tp: Ranks that share one expert's width: 1 or tp.
    """

    root: DeviceMesh
    dense: DeviceMesh
    tokens: DeviceMesh
    expert: DeviceMesh
    data: DeviceMesh
    world: DeviceMesh
    expert_tp: int

    @property
    def ep(self) -> DeviceMesh:
        """The ranks that share out the experts."""
        return self.root["ep"]

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """Process group of `ep`."""
        return self.ep.get_group()

    @property
    def tp(self) -> DeviceMesh:
        """The ranks that share the sequences, heads and vocabulary of one data rank."""
        return self.root["tp"]

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """Process group of `tp`."""
        return self.tp.get_group()

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Process group of `data`: what the tp ranks of a data rank have in common is summed over it."""
        return self.data.get_group()

    @property
    def world_group(self) -> dist.ProcessGroup:
        """Process group of `world`: losses and token counts, of which each rank has its part, are summed over it."""
        return self.world.get_group()

    @property
    def data_rank(self) -> int:
        """This rank's index among the data ranks."""
        return self.data.get_local_rank()

    @property
    def num_data_ranks(self) -> int:
        """Number of data ranks: dp · ep."""
        return self.data.size()

    @property
    def num_replicas(self) -> int:
        """Number of model replicas."""
        return self.root["dp_replicate"].size()

    def replicated(self, shards: DeviceMesh) -> DeviceMesh:
        """Return the mesh of a unit that is sharded over `shards`, with a leading axis of replicas if there are any."""
        if self.num_replicas == 1:
            return shards
        # What slicing the root by a flattened axis' name gives, for which torch 2.11 warns.
        return DeviceMesh._concatenate([self.root["dp_replicate"], shards])


def build_mesh(
    device_type: str, *, dp: int, ep: int, tp: int = 1, dp_replicate: int = 1, expert_tp: int = 1
) -> ParallelMesh:
    """Build the mesh over all ranks.

    Args:
        device_type: `cpu` or `cuda`.
        dp: Data-parallel degree, replicas included.
        ep: Expert-parallel degree.
        tp: Tensor-parallel degree.
        dp_replicate: Replicas inside dp; divides it.
        expert_tp: Ranks that share one expert's width: 1 or tp.

    Returns:
        The mesh. dp · ep · tp is the world size; `config.validate` has checked it.

    Collective: the world; every rank must call.
    """
    shape = (dp_replicate, dp // dp_replicate, ep, tp)
    root = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    dense = root["dp_shard", "ep"]._flatten("dense")
    data = root["dp_replicate", "dp_shard", "ep"]._flatten("data")
    # With tp = 1 the larger groups are those above: on a GPU each would cost a communicator of its own.
    tokens, world, expert = dense, data, root["dp_shard"]
    if tp > 1:
        tokens = root["dp_shard", "ep", "tp"]._flatten("tokens")
        world = tokens if dp_replicate == 1 else root._flatten("world")
        if expert_tp == 1:
            expert = root["dp_shard", "tp"]._flatten("expert")
    return ParallelMesh(root, dense, tokens, expert, data, world, expert_tp)
