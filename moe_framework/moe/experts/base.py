"""The interface of every expert backend, and what all of them share.

Weights are stacked, gate first: `gate_up [e, 2F, D]` holds each expert's gate rows 0 to F-1, then its up rows;
`down [e, D, F]`. The layout is the same for every backend, so checkpoints do not depend on it.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class ExpertBackend(Protocol):
    """Computes down(silu(gate(x)) · up(x) · prob) for rows grouped by expert; differentiable in all four tensors."""

    def __call__(
        self, gate_up: Tensor, down: Tensor, rows_RD: Tensor, probs_R: Tensor, tokens_per_expert: Tensor
    ) -> Tensor:
        """Apply each expert to its rows.

        Args:
            gate_up: [e, 2F, D] in the rows' dtype, or float32: it is then cast, and its gradient is float32.
            down: [e, D, F]; same dtype.
            rows_RD: [R, D] in the compute dtype, the rows of expert 0 first; R may be 0.
            probs_R: [R] float32; the routing weights.
            tokens_per_expert: [e] int64; sums to R; zeros are normal and give zero gradients.

        Returns:
            [R, D], weighted by the probs.
        """
        ...


def swiglu(gate_up_R2F: Tensor, probs_R: Tensor) -> Tensor:
    """Compute `scaled_swiglu` by the fused kernel on CUDA, in plain torch elsewhere."""
    if not gate_up_R2F.is_cuda:
        return scaled_swiglu(gate_up_R2F, probs_R)
    # Imported here because torch's CPU builds come without Triton.
    from moe_framework.moe.kernels.swiglu import fused_scaled_swiglu

    return fused_scaled_swiglu(gate_up_R2F, probs_R)


def scaled_swiglu(gate_up_R2F: Tensor, probs_R: Tensor) -> Tensor:
    """Gate the hidden values and weight them by the routing probability.

    Scaling here instead of after the down projection is the same product, on the narrower tensor.

    Source: GLU Variants Improve Transformer, arXiv:2002.05202, equation 6.

    Args:
        gate_up_R2F: [R, 2F]; gate first.
        probs_R: [R] float32.

    Returns:
        [R, F] in gate_up's dtype.
    """
    gate_RF, up_RF = gate_up_R2F.chunk(2, dim=-1)
    return F.silu(gate_RF) * up_RF * probs_R.to(up_RF.dtype)[:, None]
