import pytest
import torch

from moe_framework.moe.experts.padding import GroupPadding

COUNTS = [[5, 3, 8, 1], [0, 7, 0, 2], [0, 0, 0, 0], [16, 8, 0, 24], [1, 0, 0, 0]]


def padded_by_hand(x: torch.Tensor, counts: list[int], alignment: int) -> torch.Tensor:
    groups = []
    for rows in x.split(counts):
        groups += [rows, x.new_zeros(-len(rows) % alignment, *x.shape[1:])]
    return torch.cat(groups)


@pytest.mark.parametrize("alignment", [1, 4, 16])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("shape", [(), (6,)], ids=str)
def test_pads_each_group_with_zeros_and_back(counts: list[int], alignment: int, shape: tuple[int, ...]):
    torch.manual_seed(0)
    x = torch.randn(sum(counts), *shape, requires_grad=True)
    padding = GroupPadding(torch.tensor(counts), alignment)
    padded = padding.pad(x)
    assert torch.equal(padded, padded_by_hand(x, counts, alignment))
    assert padding.padded_counts.tolist() == [-(-count // alignment) * alignment for count in counts]
    assert torch.equal(padding.unpad(padded), x)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_gradients_are_those_of_the_plain_operations(counts: list[int]):
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 6, requires_grad=True)
    padding = GroupPadding(torch.tensor(counts), 4)
    cotangent = torch.randn(int(padding.padded_counts.sum()), 6)
    (gradient,) = torch.autograd.grad(padding.pad(x), x, cotangent)
    (expected,) = torch.autograd.grad(padded_by_hand(x, counts, 4), x, cotangent)
    assert torch.equal(gradient, expected)

    y = torch.randn(len(cotangent), 6, requires_grad=True)
    (gradient,) = torch.autograd.grad(padding.unpad(y), y, x.detach())
    assert torch.equal(gradient, padded_by_hand(x.detach(), counts, 4))
