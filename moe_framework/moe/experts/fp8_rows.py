"""Rows of experts in FP8, with one scale per expert: fused kernels on CUDA, plain torch elsewhere.

Source: FP8 Formats for Deep Learning, arXiv:2209.05433: E4M3 for values and weights, E5M2 for gradients, the scale such
that the largest value becomes the format's largest ("current" scaling).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_framework.moe.experts.base import scaled_swiglu

# The numbers of rows of transposed groups are multiples of this, and addresses multiples of as many bytes, for cuBLAS.
ALIGNMENT = 16
_FACTOR_STRIDE = ALIGNMENT // 4
_LARGEST_SCALE = 2.0**126  # its reciprocal is no denormal number

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Fp8Rows:
    """A tensor [R, C] in FP8, its rows grouped by expert.

    Attributes:
        rows: [R, C].
        transposed: Flat; one expert's [C, n] after the other, n its number of rows padded with zeros to a multiple of
            `ALIGNMENT`, and a rest without meaning; empty where it was not asked for, or R is 0.
        factors: [e, 4] float32; an expert's values are its FP8 numbers times its first factor. The others, and those
            of an expert without rows, have no meaning.
    """

    rows: Tensor
    transposed: Tensor
    factors: Tensor


def cast_rows(x_RC: Tensor, counts_e: Tensor, dtype: torch.dtype, *, transposed: bool = True) -> Fp8Rows:
    """Cast rows, with one scale per expert. Does not wait for a CUDA device.

    Args:
        x_RC: [R, C] of any float dtype; the rows of expert 0 first.
        counts_e: [e] int64; rows of each expert.
        dtype: `VALUES` or `GRADIENTS`.
        transposed: Also write the transposed groups.

    Returns:
        The FP8 tensors.
    """
    out = _empty(x_RC, x_RC.shape, counts_e, dtype, transposed)
    if x_RC.is_cuda:
        from moe_framework.moe.kernels.fp8 import launch_cast

        launch_cast(x_RC, counts_e, out)
    else:
        _cast(x_RC, counts_e, out)
    return out


def cast_swiglu(gate_up_R2F: Tensor, probs_R: Tensor, counts_e: Tensor, *, transposed: bool = True) -> Fp8Rows:
    """Compute `base.scaled_swiglu` and cast its [R, F]; arguments as there and as of `cast_rows`."""
    out = _empty(gate_up_R2F, (gate_up_R2F.shape[0], gate_up_R2F.shape[1] // 2), counts_e, VALUES, transposed)
    if gate_up_R2F.is_cuda:
        from moe_framework.moe.kernels.fp8 import launch_swiglu_cast

        launch_swiglu_cast(gate_up_R2F, probs_R, counts_e, out)
    else:
        _cast(scaled_swiglu(gate_up_R2F.float(), probs_R), counts_e, out)
    return out


def cast_swiglu_gradient(
    grad_RF: Tensor, gate_up_R2F: Tensor, probs_R: Tensor, counts_e: Tensor
) -> tuple[Fp8Rows, Tensor]:
    """Compute the gradient of `base.scaled_swiglu`, and cast that of gate and up.

    Args:
        grad_RF: [R, F]; the gradient of its result.
        gate_up_R2F: [R, 2F]; its argument.
        probs_R: [R] float32; its argument.
        counts_e: [e] int64.

    Returns:
        The gradient [R, 2F] in FP8, with transposed groups, and [R] float32, that of the probabilities.
    """
    out = _empty(gate_up_R2F, gate_up_R2F.shape, counts_e, GRADIENTS, transposed=True)
    if gate_up_R2F.is_cuda:
        from moe_framework.moe.kernels.fp8 import launch_swiglu_gradient_cast

        grad_probs_R = probs_R.new_empty(probs_R.shape)
        launch_swiglu_gradient_cast(grad_RF, gate_up_R2F, probs_R, counts_e, grad_probs_R, out)
        return out, grad_probs_R
    with torch.enable_grad():
        leaves = gate_up_R2F.detach().float().requires_grad_(), probs_R.detach().requires_grad_()
        hidden = scaled_swiglu(*leaves)
    grad_R2F, grad_probs_R = torch.autograd.grad(hidden, leaves, grad_RF.float())
    _cast(grad_R2F, counts_e, out)
    return out, grad_probs_R


def transposed_groups(flat: Tensor, width: int, counts: Sequence[int]) -> Iterator[Tensor]:
    """Yield each expert's [width, n] of `Fp8Rows.transposed`; counts are without padding."""
    padded = [-(-count // ALIGNMENT) * ALIGNMENT for count in counts]
    groups = flat[: width * sum(padded)].split([width * count for count in padded])
    return (group.view(width, count) for group, count in zip(groups, padded, strict=True))


def _empty(like: Tensor, shape: Sequence[int], counts_e: Tensor, dtype: torch.dtype, transposed: bool) -> Fp8Rows:
    num_rows, width = shape
    num_experts = counts_e.shape[0]
    # The most that padding can take, so that the host need not know the counts.
    places = width * (num_rows + num_experts * (ALIGNMENT - 1)) if transposed and num_rows else 0
    return Fp8Rows(
        like.new_empty(num_rows, width, dtype=dtype),
        like.new_empty(places, dtype=dtype),
        like.new_empty(num_experts, _FACTOR_STRIDE, dtype=torch.float32),
    )


def _cast(x_RC: Tensor, counts_e: Tensor, out: Fp8Rows) -> None:
    """Fill what `_empty` made, as the kernels do; but a NaN makes all of its expert's numbers NaN."""
    counts, most = counts_e.tolist(), torch.finfo(out.rows.dtype).max
    transposed = transposed_groups(out.transposed, out.rows.shape[1], counts) if out.transposed.numel() else None
    for x, rows, factor in zip(x_RC.split(counts), out.rows.split(counts), out.factors, strict=True):
        target = next(transposed) if transposed is not None else None
        if not x.numel():
            continue
        amax = x.abs().max().float()
        scale = torch.where(amax == 0, 1.0, (most / amax).clamp(max=_LARGEST_SCALE))
        factor.fill_(1 / scale)
        rows.copy_((x.float() * scale).half().clamp(-most, most))
        if target is not None:
            target.zero_()[:, : x.shape[0]] = rows.t()
