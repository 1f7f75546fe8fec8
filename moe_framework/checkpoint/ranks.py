"""The ranks of a store: actions whose failure on one rank is the same error on all."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from moe_framework.distributed.collectives import raise_together
from moe_framework.errors import CheckpointError


class Ranks:
    """The ranks of a gloo group, or the one process where there is no group.

    Args:
        group: The group; None is the default group.

    Attributes:
        group: The group as given.
        rank: This rank in the group.
        size: Number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1

    def together[T](self, action: Callable[[], T]) -> T:
        """Run an action on every rank; returns once all are done with it.

        Args:
            action: May communicate; if so, it fails on all ranks or on none.

        Returns:
            This rank's result.

        Raises:
            CheckpointError: The error of the lowest rank that failed, on every rank.

        Collective: the group; every rank must call.
        """
        result, error = None, None
        try:
            result = action()
        except (Exception, CheckpointException) as caught:  # DCP's is a BaseException
            error = _as_checkpoint_error(caught)
        raise_together(error, self.group)
        return result  # pyright: ignore[reportReturnType]  # set, since nothing was raised

    def on_first[T](self, action: Callable[[], T]) -> T:
        """Run an action on rank 0 and give every rank its result.

        Args:
            action: Does not communicate; its result can be pickled.

        Raises:
            CheckpointError: It failed; the same on every rank.

        Collective: the group; every rank must call.
        """
        found: list[Any] = [self.together(lambda: action() if self.rank == 0 else None)]
        if self.size > 1:
            dist.broadcast_object_list(found, group=self.group, group_src=0)
        return found[0]

    def gather[T](self, value: T) -> list[T]:
        """Give every rank the values of all, in rank order.

        Args:
            value: Can be pickled.

        Collective: the group; every rank must call.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


@contextmanager
def quiet_without_ranks() -> Iterator[None]:
    """Silence DCP's warning that one process is alone where that is meant; filters are global, so not with ranks."""
    if dist.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _as_checkpoint_error(error: BaseException) -> CheckpointError:
    rank = ""
    if isinstance(error, CheckpointException) and error.failures:
        number, (error, _) = min(error.failures.items())
        rank = f"rank {number}: "
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"{rank}{type(error).__name__}: {error}.")
