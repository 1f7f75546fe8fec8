"""One expert after another: the reference that every other backend is compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_framework.moe.experts.base import scaled_swiglu


def loop_experts(gate_up: Tensor, down: Tensor, rows_RD: Tensor, probs_R: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Apply the experts in a Python loop; see `ExpertBackend`. Syncs with the host for the counts."""
    gate_up, down = gate_up.to(rows_RD.dtype), down.to(rows_RD.dtype)
    counts = tokens_per_expert.tolist()
    groups = zip(gate_up.unbind(0), down.unbind(0), rows_RD.split(counts), probs_R.split(counts), strict=True)
    outputs = [
        F.linear(scaled_swiglu(F.linear(rows, gate_up_2FD), probs), down_DF)
        for gate_up_2FD, down_DF, rows, probs in groups
    ]
    return torch.cat(outputs)
