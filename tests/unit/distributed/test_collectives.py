import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from moe_framework.distributed.collectives import gather_sequence, raise_together, together
from moe_framework.errors import DataError
from tests.helpers.one_rank import one_rank


def test_without_a_process_group_the_error_is_raised_as_it_is():
    error = DataError("data.path=/x: missing.")
    with pytest.raises(DataError) as caught:
        raise_together(error)
    assert caught.value is error


def test_without_an_error_nothing_happens():
    raise_together(None)


def test_together_gives_the_result_or_the_users_mistake_and_leaves_bugs_alone():
    assert together(lambda: 3) == 3
    for error in (DataError("data.path=/x: missing."), ValueError("a bug")):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            together(fail)
        assert caught.value is error


class Copies(TorchDispatchMode):
    """Counts the copies that operations make of their inputs."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
        return func(*args, **(kwargs or {}))


def test_products_of_gathered_rows_copy_nothing_and_keep_one_tensor_between_them():
    weights, kept = [torch.randn(5, 5, requires_grad=True) for _ in range(3)], set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 3 * 8 * 5:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with one_rank():
        assert dist.group.WORLD is not None
        rows_BSD = gather_sequence(torch.randn(3, 8, 5, requires_grad=True), dist.group.WORLD)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Copies() as copies:
            for weight in weights:
                F.linear(rows_BSD, weight)
    assert copies.count == 0
    assert kept == {rows_BSD.untyped_storage().data_ptr()}
