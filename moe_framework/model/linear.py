"""Linear layers whose weight may be one rank's shard of the whole."""

import torch.nn.functional as F
from torch import Tensor, nn

from moe_framework.distributed.shards import local_part


class Linear(nn.Linear):
    """x · weightᵀ with the rank's part of the weight: some of its rows, or some of its columns.

    With some rows, the product holds those channels; with some columns, it is one term of a sum over the ranks.

    Attributes:
        rows: The rows to use of a weight that is here whole; None for all.
    """

    rows: slice | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Multiply [..., in] to [..., out], or to the rank's channels or term of it."""
        weight = local_part(self.weight)
        return F.linear(input, weight if self.rows is None else weight[self.rows], self.bias)
