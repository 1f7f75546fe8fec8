"""The experts with MXFP8's rounding, on any device: what 8-bit experts do to a model, without a Blackwell.

Both factors of each product, forward and backward, are rounded to E4M3 with a power-of-two scale per 32 elements
and back, and multiplied in bf16. Slower than bf16, since every rounding is done in plain operations.

Source: OCP Microscaling Formats (MX) Specification 1.0; emulated by torchao 0.18.
"""

import torch
from torch import Tensor

from moe_framework.errors import DependencyError
from moe_framework.moe.experts.base import scaled_swiglu

BLOCK = 32


def mxfp8_emulated_experts(
    gate_up: Tensor, down: Tensor, rows_RD: Tensor, probs_R: Tensor, tokens_per_expert: Tensor
) -> Tensor:
    """Apply all experts with emulated MXFP8 products; see `ExpertBackend`. bf16; D and F multiples of 32.

    Raises:
        DependencyError: torchao cannot be imported.
    """
    if rows_RD.shape[0] == 0:
        # torchao's padding takes no empty input; the sum keeps every weight in the graph, with zero gradients.
        return rows_RD + 0.0 * (gate_up.sum() + down.sum() + probs_R.sum()).to(rows_RD.dtype)
    gate_up, down = gate_up.to(rows_RD.dtype), down.to(rows_RD.dtype)
    offsets = tokens_per_expert.cumsum(0).to(torch.int32)
    gate_up_R2F = _grouped_product(rows_RD, gate_up, offsets)
    out_RD = _grouped_product(scaled_swiglu(gate_up_R2F, probs_R), down, offsets)
    if out_RD.requires_grad:
        out_RD.register_hook(Tensor.contiguous)
    return out_RD


def _grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    try:
        from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
    except ImportError as error:
        raise DependencyError(
            f"precision.mode=mxfp8_emulated needs torchao 0.18, which failed to import ({error}). Install '.[mx]'."
        ) from error
    return _to_mxfp8_then_scaled_grouped_mm(
        x,
        weight.transpose(-2, -1),
        offs=offsets,
        out_dtype=x.dtype,
        kernel_preference=KernelPreference.EMULATED,
        pad_token_groups_for_grouped_mm=True,
    )
