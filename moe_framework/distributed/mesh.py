"""The one mesh of a run, and the groups derived from it.

The root mesh has the axes (dp_replicate, dp_shard, ep, tp), tp varying fastest. A data rank is one
(dp_replicate, dp_shard, ep) coordinate: it has its own sequences, which its tp ranks share. Dense parameters
are sharded over dp_shard×ep, expert parameters over ep (whole experts) and dp_shard (inside each expert).
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
        dense: The ranks that share the dense parameters: dp_shard×ep, flattened.
        data: The ranks with different sequences: dp_replicate×dp_shard×ep, flattened.
    """

    root: DeviceMesh
    dense: DeviceMesh
    data: DeviceMesh

    @property
    def expert(self) -> DeviceMesh:
        """The ranks that share one expert's parameters: dp_shard."""
        return self.root["dp_shard"]

    @property
    def ep(self) -> DeviceMesh:
        """The ranks that share out the experts."""
        return self.root["ep"]

    @property
    def ep_group(self) -> dist.ProcessGroup:
        """Process group of `ep`."""
        return self.ep.get_group()

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Process group of `data`: losses and counts are summed over it."""
        return self.data.get_group()

    @property
    def data_rank(self) -> int:
        """This rank's index among the data ranks."""
        return self.data.get_local_rank()

    @property
    def num_data_ranks(self) -> int:
        """Number of data ranks: dp · ep."""
        return self.data.size()


def build_mesh(device_type: str, *, dp: int, ep: int, tp: int = 1, dp_replicate: int = 1) -> ParallelMesh:
    """Build the mesh over all ranks.

    Args:
        device_type: `cpu` or `cuda`.
        dp: Data-parallel degree, replicas included.
        ep: Expert-parallel degree.
        tp: Tensor-parallel degree.
        dp_replicate: Replicas inside dp; divides it.

    Returns:
        The mesh. dp · ep · tp is the world size; `config.validate` has checked it.

    Collective: the world; every rank must call.
    """
    shape = (dp_replicate, dp // dp_replicate, ep, tp)
    root = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    dense = root["dp_shard", "ep"]._flatten("dense")
    data = root["dp_replicate", "dp_shard", "ep"]._flatten("data")
    return ParallelMesh(root, dense, data)
