"""The collectives that training needs beyond those inside FSDP."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from moe_framework import errors
from moe_framework.errors import MoeFrameworkError, RankError


def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum a tensor over a group, in place and outside autograd.

    Args:
        tensor: Any shape and dtype; overwritten.
        group: The group.

    Returns:
        The same tensor.

    Collective: `group`; every rank must call.
    """
    if group.size() > 1:
        dist.all_reduce(tensor, group=group)
    return tensor


class _AllToAllRows(torch.autograd.Function):
    """Exchange of row blocks; its transpose is the exchange back, so backward swaps the splits."""

    @staticmethod
    def forward(ctx, x_ND, output_splits, input_splits, group):
        ctx.output_splits, ctx.input_splits, ctx.group = output_splits, input_splits, group
        return _exchange(x_ND, output_splits, input_splits, group)

    @staticmethod
    def backward(ctx, grad_RD):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchange(grad_RD, ctx.input_splits, ctx.output_splits, ctx.group), None, None, None


def _exchange(x: Tensor, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup) -> Tensor:
    # The functional form returns a new tensor, which selective activation checkpointing can keep; the in-place
    # form would be sent a second time in the recomputation.
    out = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), output_splits, input_splits, group.group_name)
    return torch.ops._c10d_functional.wait_tensor(out)


def all_to_all_rows(
    x_ND: Tensor, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send consecutive blocks of rows to the ranks of a group, and receive theirs; differentiable.

    Args:
        x_ND: [N, ...]; the first `input_splits[0]` rows go to the group's rank 0, and so on.
        output_splits: Rows to receive from each rank; zeros are normal.
        input_splits: Rows to send to each rank; sums to N.
        group: The group.

    Returns:
        [R, ...] with R = sum(output_splits), ordered by source rank.

    Collective: `group`; every rank must call, in forward and in backward.
    """
    return _AllToAllRows.apply(x_ND, output_splits, input_splits, group)  # pyright: ignore[reportReturnType]


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BSD, group):
        ctx.group = group
        return _all_gather_sequence(x_BSD, group)

    @staticmethod
    def backward(ctx, grad_BSD):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _reduce_scatter_sequence(grad_BSD, ctx.group), None


class _SumScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BSD, group):
        ctx.group = group
        return _reduce_scatter_sequence(x_BSD, group)

    @staticmethod
    def backward(ctx, grad_BSD):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_gather_sequence(grad_BSD, ctx.group), None


def _all_gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # Blocks arrive stacked along dim 0, one a rank; with one row that is sequence order already.
    blocks = x.transpose(0, 1).contiguous()
    out = torch.ops._c10d_functional.all_gather_into_tensor(blocks, group.size(), group.group_name)
    # One copy here, where there are several rows: of a transposed view, each product that reads it would make and keep
    # its own.
    return torch.ops._c10d_functional.wait_tensor(out).transpose(0, 1).contiguous()


def _reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    blocks = x.transpose(0, 1).contiguous()
    out = torch.ops._c10d_functional.reduce_scatter_tensor(blocks, "sum", group.size(), group.group_name)
    return torch.ops._c10d_functional.wait_tensor(out).transpose(0, 1)


def gather_sequence(x_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Put the ranks' parts of each row together; backward adds the ranks' gradients of each part.

    Args:
        x_BSD: [B, S/size, D]; this rank's consecutive positions of each row.
        group: The tensor-parallel group.

    Returns:
        [B, S, D].

    Collective: `group`; every rank must call, in forward and in backward.
    """
    return _GatherSequence.apply(x_BSD, group)  # pyright: ignore[reportReturnType]


def sum_scatter_sequence(x_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Add the ranks' tensors and keep this rank's positions; the transpose of `gather_sequence`.

    Args:
        x_BSD: [B, S, D]; this rank's term of the sum.
        group: The tensor-parallel group, whose size divides S.

    Returns:
        [B, S/size, D].

    Collective: `group`; every rank must call, in forward and in backward.
    """
    return _SumScatterSequence.apply(x_BSD, group)  # pyright: ignore[reportReturnType]


def all_reduce(tensor: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    """Reduce over a group into a new tensor, outside autograd; unlike `all_reduce_sum`, torch.compile can trace it.

    Args:
        tensor: Any shape and dtype.
        op: `sum` or `max`.
        group: The group.

    Returns:
        The result, the same on every rank.

    Collective: `group`; every rank must call.
    """
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(tensor, op, group.group_name))


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Transpose a table of counts over a group.

    Args:
        counts: [group size, e] int64; row r is for the group's rank r.
        group: The group.

    Returns:
        [group size, e] int64; row r came from rank r.

    Collective: `group`; every rank must call.
    """
    splits = [1] * group.size()
    return _exchange(counts, splits, splits, group)


def raise_together(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise the same error on every rank of a group if any rank has one.

    Args:
        error: This rank's error, or None.
        group: The group; the world by default.

    Raises:
        MoeFrameworkError: The error of the lowest failed rank, with its type and text. An error that is none of
            the framework's own is re-raised as it is on its rank and as RankError elsewhere.

    Collective: `group`; every rank must call.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        if error is not None:
            raise error
        return
    own = None if error is None else (type(error).__name__, str(error))
    reports: list[tuple[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, own, group=group)
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    first = failed[0]
    if error is not None and dist.get_rank(group) == first:
        raise error
    name, text = reports[first]  # pyright: ignore[reportGeneralTypeIssues]
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, MoeFrameworkError):
        raise kind(text) from error
    raise RankError(f"rank {first} failed: {name}: {text}") from error


def together[T](action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return what an action gives on this rank; if an error stops it on one rank, every rank says so.

    Args:
        action: May fail on some ranks only, as reading a file may; must not communicate.
        group: The group; the world by default.

    Returns:
        This rank's result.

    Raises:
        MoeFrameworkError: That of the lowest failed rank, on every rank; see `raise_together` for other errors.

    Collective: `group`; every rank must call.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as caught:  # the others would wait for a rank that left
        error = caught
    raise_together(error, group)
    return result  # pyright: ignore[reportReturnType]  # set, since nothing was raised
