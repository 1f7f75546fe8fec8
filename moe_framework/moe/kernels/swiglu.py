"""SwiGLU scaled by the routing probability, in one pass over memory each way.

Eager torch makes a tensor for silu, one for the product and one for the scaled product, forward and again backward;
here each element is read once and written once. Forward and backward compute in float32 and round once.

Source: GLU Variants Improve Transformer, arXiv:2002.05202, equation 6.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _forward_kernel(gate_up_ptr, probs_ptr, out_ptr, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    gate = tl.load(gate_up_ptr + row * 2 * F + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * F + F + columns, mask=inside, other=0.0).to(tl.float32)
    prob = tl.load(probs_ptr + row)
    out = gate * tl.sigmoid(gate) * up * prob
    tl.store(out_ptr + row * F + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(grad_ptr, gate_up_ptr, probs_ptr, grad_gate_up_ptr, grad_probs_ptr, F, BLOCK: tl.constexpr):
    # One program owns a whole row, so that the probability's gradient is summed in a fixed order without atomics.
    row = tl.program_id(0).to(tl.int64)
    prob = tl.load(probs_ptr + row)
    grad_prob = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, F, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < F
        grad = tl.load(grad_ptr + row * F + columns, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_up_ptr + row * 2 * F + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + row * 2 * F + F + columns, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        grad_prob += grad * silu * up
        grad_hidden = grad * prob
        grad_gate = grad_hidden * up * (sigmoid + silu * (1.0 - sigmoid))
        grad_up = grad_hidden * silu
        kind = grad_gate_up_ptr.dtype.element_ty
        tl.store(grad_gate_up_ptr + row * 2 * F + columns, grad_gate.to(kind), mask=inside)
        tl.store(grad_gate_up_ptr + row * 2 * F + F + columns, grad_up.to(kind), mask=inside)
    tl.store(grad_probs_ptr + row, tl.sum(grad_prob, axis=0))


class _FusedScaledSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_R2F, probs_R):
        rows, width = gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2
        out_RF = gate_up_R2F.new_empty(rows, width)
        block = min(2048, triton.next_power_of_2(width))
        if rows:
            _forward_kernel[(rows, triton.cdiv(width, block))](gate_up_R2F, probs_R, out_RF, width, BLOCK=block)
        ctx.save_for_backward(gate_up_R2F, probs_R)
        return out_RF

    @staticmethod
    def backward(ctx, grad_RF):  # pyright: ignore[reportIncompatibleMethodOverride]
        gate_up_R2F, probs_R = ctx.saved_tensors
        rows, width = grad_RF.shape
        grad_gate_up, grad_probs = torch.empty_like(gate_up_R2F), torch.empty_like(probs_R)
        block = min(2048, triton.next_power_of_2(width))
        if rows:
            _backward_kernel[(rows,)](
                grad_RF.contiguous(), gate_up_R2F, probs_R, grad_gate_up, grad_probs, width, BLOCK=block
            )
        return grad_gate_up, grad_probs


def fused_scaled_swiglu(gate_up_R2F: Tensor, probs_R: Tensor) -> Tensor:
    """Compute `experts.base.scaled_swiglu` in one kernel; differentiable in both tensors.

    Args:
        gate_up_R2F: [R, 2F] on CUDA, contiguous; gate first; R may be 0.
        probs_R: [R] float32.

    Returns:
        [R, F] in gate_up's dtype.
    """
    return _FusedScaledSwiglu.apply(gate_up_R2F.contiguous(), probs_R.contiguous())  # pyright: ignore
