import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_framework.moe.permute import (
    expert_order,
    inverse_permutation,
    permute,
    regroup_order,
    reorder_rows,
    unpermute,
)


@st.composite
def choices(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Draw [T, K] distinct experts per token, and E; T may be 0 and experts may be unused."""
    num_experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, num_experts))
    token = st.permutations(range(num_experts)).map(lambda order: order[:top_k])
    tokens = draw(st.lists(token, max_size=12))
    return torch.tensor(tokens, dtype=torch.int64).view(-1, top_k), num_experts


def tokens_like(experts: Tensor, width: int = 3) -> Tensor:
    return torch.arange(experts.shape[0] * width, dtype=torch.float64).view(-1, width) + 1


@settings(deadline=None)
@given(choices())
def test_rows_are_sorted_by_expert_and_by_token_within_one(choice: tuple[Tensor, int]):
    experts, num_experts = choice
    order = expert_order(experts, num_experts)
    top_k = experts.shape[1]
    naive = [t * top_k + row.index(e) for e in range(num_experts) for t, row in enumerate(experts.tolist()) if e in row]
    assert order.order_N.tolist() == naive
    assert order.tokens_per_expert_E.tolist() == [(experts == e).sum().item() for e in range(num_experts)]
    rows = permute(tokens_like(experts), order, top_k)
    assert torch.equal(rows, tokens_like(experts)[torch.tensor(naive, dtype=torch.int64) // top_k])


@settings(deadline=None)
@given(choices())
def test_unpermute_of_permute_is_k_times_the_tokens(choice: tuple[Tensor, int]):
    experts, num_experts = choice
    order, top_k = expert_order(experts, num_experts), experts.shape[1]
    x = tokens_like(experts)
    assert torch.equal(unpermute(permute(x, order, top_k), order, top_k), top_k * x)


@settings(deadline=None)
@given(choices(), st.integers(0, 2**31))
def test_unpermute_is_the_transpose_of_permute(choice: tuple[Tensor, int], seed: int):
    experts, num_experts = choice
    order, top_k = expert_order(experts, num_experts), experts.shape[1]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(experts.shape[0], 3, generator=generator, dtype=torch.float64)
    rows = torch.randn(experts.numel(), 3, generator=generator, dtype=torch.float64)
    forward = (permute(x, order, top_k) * rows).sum()
    assert torch.allclose(forward, (x * unpermute(rows, order, top_k)).sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", ["permute", "unpermute"])
def test_gradients_are_those_of_finite_differences(function: str):
    torch.manual_seed(0)
    experts = torch.rand(5, 4).topk(2).indices
    order = expert_order(experts, 6)
    if function == "permute":
        x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: permute(x, order, 2), x)
    else:
        rows = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda rows: unpermute(rows, order, 2), rows)


@pytest.mark.parametrize("shape", [(7,), (7, 2)])
def test_reordering_and_its_gradient(shape: tuple[int, ...]):
    torch.manual_seed(0)
    order = torch.randperm(7)
    inverse = inverse_permutation(order)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.equal(reorder_rows(x, order, inverse), x[order])
    assert torch.equal(reorder_rows(reorder_rows(x, order, inverse), inverse, order), x)
    assert torch.autograd.gradcheck(lambda x: reorder_rows(x, order, inverse), x)


@settings(deadline=None)
@given(st.permutations(range(11)))
def test_inverse_permutation(order: list[int]):
    inverse = inverse_permutation(torch.tensor(order)).tolist()
    assert [inverse[place] for place in order] == list(range(11))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_regrouping_sorts_by_expert_then_by_source(num_sources: int, num_experts: int, data: st.DataObject):
    table = st.lists(st.integers(0, 4), min_size=num_experts, max_size=num_experts)
    counts = data.draw(st.lists(table, min_size=num_sources, max_size=num_sources))
    rows = [(s, e, i) for s in range(num_sources) for e in range(num_experts) for i in range(counts[s][e])]
    order = regroup_order(torch.tensor(counts), len(rows))
    assert [rows[place] for place in order.tolist()] == sorted(rows, key=lambda row: (row[1], row[0], row[2]))
