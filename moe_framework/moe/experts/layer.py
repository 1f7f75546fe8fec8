"""The experts' parameters, as a module that FSDP can shard by itself.

FSDP gathers them in the compute dtype; where it does not shard them, the backend gets the float32 parameters.
"""

import torch
from torch import Tensor, nn

from moe_framework.distributed.shards import local_part
from moe_framework.moe.experts.base import ExpertBackend


class GroupedExperts(nn.Module):
    """The stacked weights of a layer's experts, computed by a backend.

    Where ranks share each expert's width, `gate_up` is [E, 2, F, D], of which a rank has F/expert_tp: so its part of
    the gate and its part of up are one shard. In a checkpoint it is [E, 2F, D] like everywhere else.

    Args:
        num_experts: Experts E of the layer.
        hidden_size: D.
        intermediate_size: F.
        backend: How they are computed.
    """

    def __init__(self, *, num_experts: int, hidden_size: int, intermediate_size: int, backend: ExpertBackend):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.backend = backend

    def forward(self, rows_RD: Tensor, probs_R: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Apply this rank's experts, or its slice of their width, in the rows' dtype; see `ExpertBackend`."""
        gate_up = local_part(self.gate_up)
        gate_up = gate_up.flatten(1, 2) if gate_up.dim() == 4 else gate_up
        return self.backend(gate_up, local_part(self.down), rows_RD, probs_R, tokens_per_expert)
