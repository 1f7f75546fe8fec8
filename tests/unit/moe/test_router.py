import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_framework.moe.router import TopKRouter


def make_router(*, num_experts: int = 8, top_k: int = 3, hidden_size: int = 16) -> TopKRouter:
    torch.manual_seed(0)
    router = TopKRouter(hidden_size=hidden_size, num_experts=num_experts, top_k=top_k)
    nn.init.normal_(router.weight)
    return router


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_probs_are_the_full_softmax_renormalised_over_the_chosen(top_k: int):
    router = make_router(top_k=top_k)
    x = torch.randn(50, 16)
    probs, experts, _ = router(x)
    full = torch.softmax(x.double() @ router.weight.double().t(), dim=-1)
    chosen = full.gather(1, experts)
    torch.testing.assert_close(probs.double(), chosen / chosen.sum(-1, keepdim=True), rtol=1e-5, atol=1e-7)


def test_the_k_most_probable_experts_are_chosen_the_best_first():
    router = make_router(top_k=3)
    x = torch.randn(50, 16)
    routing = router(x)
    by_score = (x.double() @ router.weight.double().t()).argsort(-1, descending=True)
    assert torch.equal(routing.experts_TK, by_score[:, :3])
    assert routing.probs_TK.diff(dim=-1).le(0).all()


def test_scores_are_float32_for_bfloat16_tokens_and_weights():
    router = make_router().bfloat16()
    x = torch.randn(400, 16, dtype=torch.bfloat16)
    routing = router(x)
    assert routing.logits_TE.dtype == routing.probs_TK.dtype == torch.float32
    exact = x.double() @ router.weight.double().t()
    torch.testing.assert_close(routing.logits_TE.double(), exact, rtol=0, atol=1e-5)
    # A bf16 product would be off by 2^-9 of a logit, and would choose otherwise for some tokens.
    assert (F.linear(x, router.weight).double() - exact).abs().max() > 1e-3
    assert torch.equal(routing.experts_TK, exact.topk(3).indices)


def test_no_tokens_route_to_nothing_and_give_zero_gradient():
    router = make_router()
    routing = router(torch.empty(0, 16))
    assert routing.probs_TK.shape == routing.experts_TK.shape == (0, 3)
    assert routing.logits_TE.shape == (0, 8)
    (routing.probs_TK.sum() + routing.logits_TE.sum()).backward()
    assert router.weight.grad is not None
    assert router.weight.grad.count_nonzero() == 0


def test_gradient_of_the_probs_reaches_the_chosen_rows_only():
    router = make_router(top_k=2)
    routing = router(torch.randn(1, 16))
    (routing.probs_TK * torch.tensor([[1.0, -2.0]])).sum().backward()
    assert router.weight.grad is not None
    touched = router.weight.grad.abs().sum(1).nonzero().flatten().tolist()
    assert touched == sorted(routing.experts_TK.flatten().tolist())
