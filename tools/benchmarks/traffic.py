"""Bytes that a rank sends to others for one dispatch and combine: by formula, and counted at the collectives.

A block that a rank keeps for itself is not traffic. Over all ranks, as many bytes are received as are sent.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PROB_BYTES = 4
COUNT_BYTES = 8
EXPERT_NUMBER_BYTES = 8


class Traffic(NamedTuple):
    """Bytes sent by one rank."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Forward and backward together."""
        return self.forward + self.backward


def all_to_all_traffic(
    input_splits: Sequence[int], output_splits: Sequence[int], ep_rank: int, *, num_experts: int, row_bytes: int
) -> Traffic:
    """Bytes that `AllToAllDispatcher` sends.

    With s the rows sent to other ranks and r the rows received from them: forward sends the counts, s rows with
    their weights, and r results; backward sends s gradients of results, and r gradients of rows and weights.

    Args:
        input_splits: Rows for each rank of the group.
        output_splits: Rows from each rank of the group.
        ep_rank: This rank.
        num_experts: Experts E of the layer.
        row_bytes: Bytes of one row, D · bytes per element.

    Returns:
        The bytes.
    """
    sent = sum(input_splits) - input_splits[ep_rank]
    received = sum(output_splits) - output_splits[ep_rank]
    ep = len(input_splits)
    counts = (ep - 1) * (num_experts // ep) * COUNT_BYTES
    weighted_row_bytes = row_bytes + PROB_BYTES
    return Traffic(
        forward=counts + sent * weighted_row_bytes + received * row_bytes,
        backward=sent * row_bytes + received * weighted_row_bytes,
    )


def all_gather_traffic(num_tokens: int, *, ep: int, top_k: int, row_bytes: int) -> Traffic:
    """Bytes that `AllGatherDispatcher` sends, whatever the routing.

    Forward gathers tokens, weights and expert numbers, and reduce-scatters results; backward gathers the results'
    gradients, and reduce-scatters those of tokens and weights. Each of them sends ep-1 blocks of a rank's size.

    Args:
        num_tokens: Tokens T of each rank.
        ep: Ranks of the group.
        top_k: Experts per token K.
        row_bytes: Bytes of one row, D · bytes per element.

    Returns:
        The bytes.
    """
    return Traffic(
        forward=(ep - 1) * num_tokens * (2 * row_bytes + top_k * (PROB_BYTES + EXPERT_NUMBER_BYTES)),
        backward=(ep - 1) * num_tokens * (2 * row_bytes + top_k * PROB_BYTES),
    )


class SentBytes(TorchDispatchMode):
    """Counts, while active, the bytes that functional collectives send to other ranks, forward and backward.

    Args:
        ep_rank: This rank in the group of the collectives.
    """

    def __init__(self, ep_rank: int):
        super().__init__()
        self._ep_rank = ep_rank
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a collective and run any operation."""
        collectives = torch.ops._c10d_functional
        packet = func.overloadpacket
        if packet is collectives.all_to_all_single:
            x, _, input_splits, _ = args
            row_bytes = math.prod(x.shape[1:]) * x.itemsize
            self.total += (sum(input_splits) - input_splits[self._ep_rank]) * row_bytes
        elif packet is collectives.all_gather_into_tensor:
            x, size, _ = args
            self.total += (size - 1) * x.nbytes
        elif packet is collectives.reduce_scatter_tensor:
            x, _, size, _ = args
            self.total += x.nbytes // size * (size - 1)
        return func(*args, **(kwargs or {}))
