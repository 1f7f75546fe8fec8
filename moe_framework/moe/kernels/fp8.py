"""Rows of experts cast to FP8 with one scale per expert, in two passes over memory: the largest value, then the cast.

Hopper's FP8 products read both factors along the summed dimension, so that a tensor is needed as it is for one product
and transposed for another: the second pass writes both. What comes between two products, SwiGLU and its gradient, is
computed inside the passes and never stored in bf16. Every kernel below runs as either pass (`CAST`).

Source: FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_framework.moe.experts.fp8_rows import ALIGNMENT, Fp8Rows


class _Pass(NamedTuple):
    """How a kernel goes over its rows: the tile, the tiles of a program (None: the whole width), and warps."""

    rows: int
    columns: int
    blocks: int | None
    warps: int


# The fastest of some tried on an H200 at Mixtral's widths.
_LARGEST, _LARGEST_GRADIENT = _Pass(16, 256, None, 4), _Pass(8, 256, None, 4)
_CAST, _CAST_SWIGLU, _CAST_GRADIENT = _Pass(128, 128, 1, 8), _Pass(32, 256, 1, 8), _Pass(32, 128, 1, 4)
# Largest scale whose reciprocal is no denormal number.
_MOST = tl.constexpr(2.0**126)


@triton.jit
def _place(counts_ptr, num_experts, ALIGN: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Find this program's expert, its rows, the expert's first row, and those numbers in padded groups."""
    tile = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + experts, mask=experts < num_experts, other=0)
    tiles = (counts + ROWS - 1) // ROWS
    last_tiles = tl.cumsum(tiles, 0)
    expert = tl.sum((last_tiles <= tile).to(tl.int64), 0)
    earlier, here = experts < expert, experts == expert
    row = (tile - tl.sum(tl.where(earlier, tiles, 0), 0)) * ROWS + tl.arange(0, ROWS)
    count, first = tl.sum(tl.where(here, counts, 0), 0), tl.sum(tl.where(earlier, counts, 0), 0)
    # Multiplied last, so that the compiler sees the multiple and writes as many bytes at once.
    units = (counts + ALIGN - 1) // ALIGN
    padded_count = tl.sum(tl.where(here, units, 0), 0) * ALIGN
    padded_first = tl.sum(tl.where(earlier, units, 0), 0) * ALIGN
    return expert, row, count, first, padded_count, padded_first


@triton.jit
def _load(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _scale(amax_ptr, factors_ptr, place, LARGEST: tl.constexpr):
    """Return the expert's scale, and keep its reciprocal. An infinite value makes every result infinite or NaN."""
    amax = tl.load(amax_ptr + place)
    scale = tl.where(amax == 0.0, 1.0, tl.minimum(LARGEST / amax, _MOST))
    tl.store(factors_ptr + place, 1.0 / scale)
    return scale


@triton.jit
def _store(
    values, rows_ptr, transposed_ptr, row, count, first, padded_count, padded_first, columns, inside, C,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write a cast tile into the rows, and into the expert's transposed group with zeros for its padding."""
    kind = rows_ptr.dtype.element_ty
    # By way of float16, which has room for either format, and through which the tile is transposed: ptxas 12.9, which
    # Triton 3.6 brings, puts single bytes of a transposed FP8 tile into wrong places (triton#11111).
    values = values.to(tl.float16)
    target = rows_ptr + (first + row)[:, None] * C + columns[None, :]
    tl.store(target, values.to(tl.float32).to(kind), mask=(row < count)[:, None] & inside[None, :])
    if TRANSPOSED:
        target = transposed_ptr + padded_first * C + columns[:, None] * padded_count + row[None, :]
        small = tl.trans(values).to(tl.float32).to(kind)
        tl.store(target, small, mask=inside[:, None] & (row < padded_count)[None, :])


@triton.jit
def _plain_kernel(
    x_ptr, counts_ptr, amax_ptr, factors_ptr, rows_ptr, transposed_ptr, num_experts, C,
    LARGEST: tl.constexpr, STRIDE: tl.constexpr, ALIGN: tl.constexpr, EXPERTS: tl.constexpr,
    CAST: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    place = _place(counts_ptr, num_experts, ALIGN, EXPERTS, ROWS)
    expert, row, count, first, padded_count, padded_first = place  # pyright: ignore[reportGeneralTypeIssues]
    if expert < num_experts:
        if CAST:
            scale = _scale(amax_ptr, factors_ptr, expert * STRIDE, LARGEST)
        most = tl.zeros((ROWS, COLUMNS), tl.float32)
        for block in range(BLOCKS):
            columns = ((tl.program_id(1) * BLOCKS + block) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
            inside = columns < C
            x = _load(x_ptr + (first + row)[:, None] * C + columns[None, :], (row < count)[:, None] & inside[None, :])
            if CAST:
                _store(
                    x * scale, rows_ptr, transposed_ptr, row, count, first, padded_count, padded_first, columns,
                    inside, C, TRANSPOSED,
                )  # fmt: skip
            else:
                most = tl.maximum(most, tl.abs(x))
        if not CAST:
            tl.atomic_max(amax_ptr + expert * STRIDE, tl.max(most))


@triton.jit
def _swiglu_kernel(
    gate_up_ptr, probs_ptr, counts_ptr, amax_ptr, factors_ptr, rows_ptr, transposed_ptr, num_experts, C,
    LARGEST: tl.constexpr, STRIDE: tl.constexpr, ALIGN: tl.constexpr, EXPERTS: tl.constexpr,
    CAST: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    place = _place(counts_ptr, num_experts, ALIGN, EXPERTS, ROWS)
    expert, row, count, first, padded_count, padded_first = place  # pyright: ignore[reportGeneralTypeIssues]
    if expert < num_experts:
        if CAST:
            scale = _scale(amax_ptr, factors_ptr, expert * STRIDE, LARGEST)
        most = tl.zeros((ROWS, COLUMNS), tl.float32)
        prob = _load(probs_ptr + first + row, row < count)[:, None]
        for block in range(BLOCKS):
            columns = ((tl.program_id(1) * BLOCKS + block) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
            inside = columns < C
            here = (row < count)[:, None] & inside[None, :]
            gate_ptr = gate_up_ptr + (first + row)[:, None] * 2 * C + columns[None, :]
            gate, up = _load(gate_ptr, here), _load(gate_ptr + C, here)
            hidden = gate * tl.sigmoid(gate) * up * prob
            if CAST:
                _store(
                    hidden * scale, rows_ptr, transposed_ptr, row, count, first, padded_count, padded_first, columns,
                    inside, C, TRANSPOSED,
                )  # fmt: skip
            else:
                most = tl.maximum(most, tl.abs(hidden))
        if not CAST:
            tl.atomic_max(amax_ptr + expert * STRIDE, tl.max(most))


@triton.jit
def _swiglu_gradient_kernel(
    grad_ptr, gate_up_ptr, probs_ptr, grad_probs_ptr, counts_ptr, amax_ptr, factors_ptr, rows_ptr, transposed_ptr,
    num_experts, C,
    LARGEST: tl.constexpr, STRIDE: tl.constexpr, ALIGN: tl.constexpr, EXPERTS: tl.constexpr,
    CAST: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    place = _place(counts_ptr, num_experts, ALIGN, EXPERTS, ROWS)
    expert, row, count, first, padded_count, padded_first = place  # pyright: ignore[reportGeneralTypeIssues]
    if expert < num_experts:
        if CAST:
            scale = _scale(amax_ptr, factors_ptr, expert * STRIDE, LARGEST)
        most = tl.zeros((ROWS, COLUMNS), tl.float32)
        # In the first pass a program has whole rows, so that a probability's gradient is summed in a fixed order.
        grad_prob = tl.zeros((ROWS, COLUMNS), tl.float32)
        prob = _load(probs_ptr + first + row, row < count)[:, None]
        for block in range(BLOCKS):
            columns = ((tl.program_id(1) * BLOCKS + block) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
            inside = columns < C
            here = (row < count)[:, None] & inside[None, :]
            gate_ptr = gate_up_ptr + (first + row)[:, None] * 2 * C + columns[None, :]
            gate, up = _load(gate_ptr, here), _load(gate_ptr + C, here)
            grad = _load(grad_ptr + (first + row)[:, None] * C + columns[None, :], here)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            grad_gate = grad * prob * up * (sigmoid + silu * (1.0 - sigmoid))
            grad_up = grad * prob * silu
            if CAST:
                _store(
                    grad_gate * scale, rows_ptr, transposed_ptr, row, count, first, padded_count, padded_first,
                    columns, inside, 2 * C, TRANSPOSED,
                )  # fmt: skip
                _store(
                    grad_up * scale, rows_ptr, transposed_ptr, row, count, first, padded_count, padded_first,
                    columns + C, inside, 2 * C, TRANSPOSED,
                )  # fmt: skip
            else:
                most = tl.maximum(most, tl.maximum(tl.abs(grad_gate), tl.abs(grad_up)))
                grad_prob += grad * silu * up
        if not CAST:
            tl.atomic_max(amax_ptr + expert * STRIDE, tl.max(most))
            tl.store(grad_probs_ptr + first + row, tl.sum(grad_prob, 1), mask=row < count)


def launch_cast(x_RC: Tensor, counts_e: Tensor, out: Fp8Rows) -> None:
    """Fill what `experts.fp8_rows.cast_rows` returns."""
    _launch(_plain_kernel, (_LARGEST, _CAST), (x_RC,), x_RC.shape[1], counts_e, out)


def launch_swiglu_cast(gate_up_R2F: Tensor, probs_R: Tensor, counts_e: Tensor, out: Fp8Rows) -> None:
    """Fill what `experts.fp8_rows.cast_swiglu` returns."""
    _launch(_swiglu_kernel, (_LARGEST, _CAST_SWIGLU), (gate_up_R2F, probs_R), out.rows.shape[1], counts_e, out)


def launch_swiglu_gradient_cast(
    grad_RF: Tensor, gate_up_R2F: Tensor, probs_R: Tensor, counts_e: Tensor, grad_probs_R: Tensor, out: Fp8Rows
) -> None:
    """Fill what `experts.fp8_rows.cast_swiglu_gradient` returns."""
    sources = grad_RF, gate_up_R2F, probs_R, grad_probs_R
    passes = _LARGEST_GRADIENT, _CAST_GRADIENT
    _launch(_swiglu_gradient_kernel, passes, sources, grad_RF.shape[1], counts_e, out)


def _launch(
    kernel, passes: tuple[_Pass, _Pass], sources: Sequence[Tensor], width: int, counts_e: Tensor, out: Fp8Rows
) -> None:
    num_rows, num_experts = out.rows.shape[0], counts_e.shape[0]
    if not num_rows:
        return
    counts_e, *sources = (tensor.contiguous() for tensor in (counts_e, *sources))
    amax = torch.zeros_like(out.factors)
    for cast, how in zip((False, True), passes, strict=True):
        blocks = how.blocks or triton.cdiv(width, how.columns)
        # No expert has more than one tile that is not full, so that the host need not know the counts.
        grid = (triton.cdiv(num_rows, how.rows) + num_experts, triton.cdiv(width, how.columns * blocks))
        kernel[grid](
            *sources, counts_e, amax, out.factors, out.rows, out.transposed, num_experts, width,
            LARGEST=torch.finfo(out.rows.dtype).max, STRIDE=amax.stride(0), ALIGN=ALIGNMENT,
            EXPERTS=triton.next_power_of_2(num_experts), CAST=cast, TRANSPOSED=out.transposed.numel() > 0,
            ROWS=how.rows, COLUMNS=how.columns, BLOCKS=blocks, num_warps=how.warps,
        )  # fmt: skip
