"""Rows of zeros after each expert's, so that its number of rows is a multiple of what a format needs.

Zeros add nothing to any product, and their results are dropped. Both directions gather, forward and backward: what
autograd would derive for an indexed copy scatters, which on CUDA takes several times as long.
"""

import torch
from torch import Tensor

from moe_framework.moe.counts import HostCounts


class GroupPadding:
    """The places of a layer's rows among padded groups. Syncs with the host, unless the counts are `HostCounts`.

    Attributes:
        padded_counts: [e] int64; rows of each expert, padding included.

    Args:
        tokens_per_expert: [e] int64.
        alignment: Each group becomes a multiple of this.
    """

    def __init__(self, tokens_per_expert: Tensor, alignment: int):
        counts = HostCounts.of(tokens_per_expert)
        values = counts.tolist()
        padded_values = [-(-count // alignment) * alignment for count in values]
        num_rows, num_padded = sum(values), sum(padded_values)
        self.padded_counts = HostCounts.of((counts + alignment - 1) // alignment * alignment, padded_values)
        padding = self.padded_counts - counts
        device = counts.device
        before = padding.cumsum(0) - padding
        shift = torch.repeat_interleave(before, counts, output_size=num_rows)
        self._place_R = torch.arange(num_rows, device=device) + shift
        self._empty_P = _empty_places(counts, padding, self.padded_counts, num_padded - num_rows)
        self._source_N = torch.zeros(num_padded, dtype=torch.int64, device=device)
        self._source_N[self._place_R] = torch.arange(num_rows, device=device)

    def pad(self, x_R: Tensor) -> Tensor:
        """Return [R + padding, ...] of x [R, ...] with zeros in the padding; differentiable."""
        return _Pad.apply(x_R, self._source_N, self._place_R, self._empty_P)  # pyright: ignore[reportReturnType]

    def unpad(self, x_N: Tensor) -> Tensor:
        """Return the rows that are not padding; differentiable."""
        return _Unpad.apply(x_N, self._source_N, self._place_R, self._empty_P)  # pyright: ignore[reportReturnType]


def _empty_places(counts: Tensor, padding: Tensor, padded_counts: Tensor, num_empty: int) -> Tensor:
    """[P] int64; the places of the padding, group after group."""
    first_empty = padded_counts.cumsum(0) - padding
    shift = first_empty - (padding.cumsum(0) - padding)
    return torch.arange(num_empty, device=counts.device) + torch.repeat_interleave(
        shift, padding, output_size=num_empty
    )


def _spread(x_R: Tensor, source_N: Tensor, empty_P: Tensor) -> Tensor:
    if x_R.shape[0] == 0:
        return x_R.new_zeros(source_N.shape[0], *x_R.shape[1:])
    return x_R.index_select(0, source_N).index_fill_(0, empty_P, 0)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_R, source_N, place_R, empty_P):
        ctx.save_for_backward(place_R)
        return _spread(x_R, source_N, empty_P)

    @staticmethod
    def backward(ctx, grad_N):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_N.index_select(0, ctx.saved_tensors[0]), None, None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_N, source_N, place_R, empty_P):
        ctx.save_for_backward(source_N, empty_P)
        return x_N.index_select(0, place_R)

    @staticmethod
    def backward(ctx, grad_R):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _spread(grad_R, *ctx.saved_tensors), None, None, None
