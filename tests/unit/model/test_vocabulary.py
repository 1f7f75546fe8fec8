import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_framework.model.vocabulary import Embedding
from tests.unit.model.builders import relative_difference

V, D, T = 8, 16, 4096
BF16_ROUNDING = 2.0**-9


def table_with_gradient(weight: Tensor, tokens: Tensor, cotangent: Tensor, first_row: int | None = None) -> Embedding:
    embedding = Embedding(weight.shape[0], weight.shape[1], _weight=weight.clone())
    embedding.first_row = first_row
    embedding(tokens).backward(cotangent)
    return embedding


@pytest.mark.parametrize("first_row", [None, 0, 2])
def test_gradient_of_a_bf16_table_is_the_exact_sum_over_thousands_of_tokens_rounded_once(first_row: int | None):
    torch.manual_seed(0)
    weight, tokens = torch.randn(V, D).bfloat16(), torch.randint(0, V, (2, T // 2))
    cotangent = (torch.randn(2, T // 2, D) + 0.3).bfloat16()
    own = weight if first_row is None else weight[first_row : first_row + 5]
    gradient = table_with_gradient(own, tokens, cotangent, first_row).weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.bfloat16
    exact = F.one_hot(tokens.flatten(), V).double().t() @ cotangent.flatten(0, 1).double()
    expected = exact if first_row is None else exact[first_row : first_row + 5]
    assert relative_difference(gradient, expected) < BF16_ROUNDING


def test_rows_and_gradient_of_an_fp32_table_are_torchs():
    torch.manual_seed(1)
    weight, tokens, cotangent = torch.randn(V, D), torch.randint(0, V, (3, 7)), torch.randn(3, 7, D)
    reference = weight.clone().requires_grad_()
    F.embedding(tokens, reference).backward(cotangent)
    embedding = table_with_gradient(weight, tokens, cotangent)
    assert torch.equal(embedding(tokens), weight[tokens])
    assert embedding.weight.grad is not None
    assert reference.grad is not None
    assert torch.equal(embedding.weight.grad, reference.grad)


def test_a_row_without_tokens_has_a_gradient_of_exactly_zero():
    embedding = table_with_gradient(torch.randn(V, D).bfloat16(), torch.tensor([[1, 1, 4]]), torch.ones(1, 3, D))
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.any(dim=1).nonzero().flatten().tolist() == [1, 4]
