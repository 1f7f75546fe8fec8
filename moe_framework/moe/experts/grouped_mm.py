"""The experts as two grouped matrix multiplications of torch, without a host-device sync."""

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_framework.moe.experts.base import swiglu

ALIGNMENT_BYTES = 16


def grouped_mm_experts(
    gate_up: Tensor, down: Tensor, rows_RD: Tensor, probs_R: Tensor, tokens_per_expert: Tensor
) -> Tensor:
    """Apply all experts at once; see `ExpertBackend`.

    D and F must be multiples of 16 bytes (`unsupported_reason`).
    """
    gate_up, down = gate_up.to(rows_RD.dtype), down.to(rows_RD.dtype)
    offsets = tokens_per_expert.cumsum(0).to(torch.int32)
    gate_up_R2F = F.grouped_mm(rows_RD, gate_up.transpose(-2, -1), offs=offsets)
    hidden_RF = swiglu(gate_up_R2F, probs_R)
    out_RD = F.grouped_mm(hidden_RF, down.transpose(-2, -1), offs=offsets)
    if out_RD.requires_grad:
        # A broadcast gradient has stride 0, which grouped_mm's backward refuses (torch 2.11).
        out_RD.register_hook(Tensor.contiguous)
    return out_RD


def unsupported_reason(*, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device_type: str) -> str | None:
    """Say why `grouped_mm` cannot compute a layer.

    Args:
        hidden_size: D.
        intermediate_size: F.
        dtype: Compute dtype.
        device_type: `cpu` or `cuda`.

    Returns:
        The reason, or None where it can.
    """
    multiple = ALIGNMENT_BYTES // dtype.itemsize
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        if size % multiple:
            return f"{name}={size} is no multiple of {multiple}: rows of {dtype} must be multiples of 16 bytes"
    if device_type == "cuda" and dtype != torch.bfloat16:
        return f"torch's CUDA kernel takes bfloat16, not {dtype}"
    return None
