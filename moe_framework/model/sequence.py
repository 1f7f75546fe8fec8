"""Sequence parallelism: between attention layers, each rank of a tensor-parallel group holds a part of every row.

Norms, router and experts work on the rank's own positions. Attention and the head need whole rows: they gather them,
compute with the rank's heads or vocabulary, and their sums are scattered over the positions again.

Source: Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198, section 4.2.2.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from moe_framework.distributed.collectives import gather_sequence, sum_scatter_sequence
from moe_framework.moe.layer import TokenLayout


class WholeSequence:
    """Every rank holds whole rows: no tensor parallelism."""

    def gather(self, x_BSD: Tensor) -> Tensor:
        """Return whole rows, [B, S, D]."""
        return x_BSD

    def sum_scatter(self, x_BSD: Tensor) -> Tensor:
        """Return the sum over the group's ranks at this rank's positions."""
        return x_BSD

    def layout(self, shape: torch.Size, valid_index_T: Tensor | None, device: torch.device) -> TokenLayout:
        """Describe the tokens that this rank routes.

        Args:
            shape: [B, S] of the whole micro-batch.
            valid_index_T: [T] int64; flat positions b·S+s that hold tokens; None when there is no padding.
            device: Where the layout is needed.

        Returns:
            The layout of this rank's positions.
        """
        return TokenLayout.of(shape, valid_index_T, device)


class SequenceShard(WholeSequence):
    """Each rank of the group holds S/size consecutive positions of each row, in rank order.

    Args:
        group: The tensor-parallel group.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self._rank, self._size = dist.get_rank(group), group.size()

    def gather(self, x_BSD: Tensor) -> Tensor:
        """Gather [B, S/size, D] to [B, S, D]. Collective: the group, also in backward."""
        return gather_sequence(x_BSD, self.group)

    def sum_scatter(self, x_BSD: Tensor) -> Tensor:
        """Sum [B, S, D] over the group into [B, S/size, D]. Collective: the group, also in backward."""
        return sum_scatter_sequence(x_BSD, self.group)

    def layout(self, shape: torch.Size, valid_index_T: Tensor | None, device: torch.device) -> TokenLayout:
        """Describe this rank's tokens; see `WholeSequence.layout`."""
        num_rows, length = shape
        assert length % self._size == 0, "validate() requires tp to divide the rows' length"
        own_length = length // self._size
        own_shape = torch.Size((num_rows, own_length))
        if valid_index_T is None:
            return TokenLayout.of(own_shape, None, device)
        row, position = valid_index_T // length, valid_index_T % length - self._rank * own_length
        # On a GPU the selection waits for the device, once a micro-batch: the host has to know how many tokens it has.
        own = (position >= 0) & (position < own_length)
        return TokenLayout.of(own_shape, (row * own_length + position)[own], device)
