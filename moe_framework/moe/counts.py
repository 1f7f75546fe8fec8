"""Counts whose values the host knows."""

from typing import Any

import torch
from torch import Tensor


class HostCounts(Tensor):
    """Counts on a device whose values the host has already waited for; `tolist` returns them without waiting again.

    Every wait drains the queue of a GPU, which then idles until the host has refilled it. The results of operations
    are plain tensors.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl
    host_values: tuple[int, ...]

    @classmethod
    def of(cls, counts: Tensor, values: list[int] | None = None) -> "HostCounts":
        """Attach the values to a tensor, whose memory is shared.

        Args:
            counts: [n] int64.
            values: What it holds; None to read it, which waits for the device unless it is known already.

        Returns:
            The same counts.
        """
        if values is None and isinstance(counts, cls):
            return counts
        known = counts.as_subclass(cls)
        known.host_values = tuple(counts.tolist() if values is None else values)
        return known

    def tolist(self) -> list[int]:
        """Return the values, on the host."""
        return list(self.host_values)
