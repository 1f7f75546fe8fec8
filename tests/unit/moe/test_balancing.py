import math

import pytest
import torch
from torch import Tensor

from moe_framework.moe.balancing import Balancing, RouterStats, global_batch_aux_loss, sequence_aux_loss
from moe_framework.moe.router import Routing, TopKRouter

E, K = 6, 2


def random_routing(rows: list[int], seed: int = 0, *, requires_grad: bool = False) -> tuple[Routing, Tensor]:
    """Routing of sum(rows) tokens with these numbers of tokens per row, and the row of each."""
    torch.manual_seed(seed)
    logits = (2 * torch.randn(sum(rows), E)).requires_grad_(requires_grad)
    top_logits, experts = logits.topk(K)
    row_of_token = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    return Routing(top_logits.softmax(-1), experts, logits), row_of_token


def naive_sequence_loss(routing: Routing, row_of_token: Tensor, num_rows: int) -> float:
    """Add up E · Σ_e f_e · P_e of each row, times the row's tokens, one number at a time."""
    total = 0.0
    for row in range(num_rows):
        tokens = [t for t, r in enumerate(row_of_token.tolist()) if r == row]
        for expert in range(E):
            slots = sum(expert in routing.experts_TK[t].tolist() for t in tokens)
            prob = sum(_softmax(routing.logits_TE[t].tolist())[expert] for t in tokens)
            if tokens:
                total += len(tokens) * E * (slots / (len(tokens) * K)) * (prob / len(tokens))
    return total


def _softmax(logits: list[float]) -> list[float]:
    exponentials = [math.exp(logit) for logit in logits]
    return [value / sum(exponentials) for value in exponentials]


@pytest.mark.parametrize("rows", [[5], [4, 4, 4], [7, 1, 12], [0, 3, 0, 9, 0], [0, 0]], ids=str)
def test_sequence_loss_follows_its_formula(rows: list[int]):
    routing, row_of_token = random_routing(rows)
    stats = Balancing("sequence")(routing, row_of_token, len(rows))
    assert stats.aux_loss.item() == pytest.approx(naive_sequence_loss(routing, row_of_token, len(rows)), rel=1e-5)


def test_sequence_loss_of_rows_is_the_sum_of_each_rows_own():
    routing, row_of_token = random_routing([5, 3, 8])
    alone = 0.0
    for row in range(3):
        mask = row_of_token == row
        part = Routing(*(tensor[mask] for tensor in routing))
        alone += Balancing("sequence")(part, torch.zeros(int(mask.sum()), dtype=torch.int64), 1).aux_loss.item()
    assert Balancing("sequence")(routing, row_of_token, 3).aux_loss.item() == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("kind", ["sequence", "global_batch"])
def test_balanced_routing_costs_one_per_token(kind: str):
    torch.manual_seed(0)
    experts = torch.tensor([[0, 1], [2, 3], [4, 5]] * 4)
    routing = Routing(torch.full((12, K), 0.5), experts, torch.randn(12, E))
    stats = Balancing(kind)(routing, torch.arange(12) // 3, 4)
    assert stats.aux_loss.item() == pytest.approx(12, rel=1e-6)


@pytest.mark.parametrize("kind", ["sequence", "global_batch"])
def test_collapsed_routing_costs_e_over_k_per_token(kind: str):
    logits = torch.full((10, E), -50.0)
    logits[:, 2] = logits[:, 4] = 50.0
    routing = Routing(torch.full((10, K), 0.5), torch.tensor([[2, 4]] * 10), logits)
    stats = Balancing(kind)(routing, torch.arange(10) // 5, 2)
    assert stats.aux_loss.item() == pytest.approx(10 * E / K, rel=1e-6)


def test_global_batch_loss_ignores_rows_and_follows_its_formula():
    routing, row_of_token = random_routing([7, 1, 12])
    loss = Balancing("global_batch")(routing, row_of_token, 3).aux_loss.item()
    assert loss == Balancing("global_batch")(routing, torch.zeros_like(row_of_token), 1).aux_loss.item()
    assert loss == pytest.approx(naive_sequence_loss(routing, torch.zeros_like(row_of_token), 1), rel=1e-5)


def test_none_costs_nothing():
    routing, row_of_token = random_routing([4, 4])
    assert Balancing("none")(routing, row_of_token, 2).aux_loss.item() == 0


def test_gradient_goes_through_the_probabilities_and_not_through_the_choice():
    torch.manual_seed(0)
    probs = torch.rand(9, E, dtype=torch.float64, requires_grad=True)
    chosen = torch.zeros(9, E, dtype=torch.float64).scatter_(1, torch.rand(9, E).topk(K).indices, 1.0)
    row_of_token = torch.arange(9) // 4

    assert torch.autograd.gradcheck(lambda p: sequence_aux_loss(p, chosen, row_of_token, 3), probs)
    assert torch.autograd.gradcheck(lambda p: global_batch_aux_loss(p, chosen, None), probs)
    chosen.requires_grad_()
    (sequence_aux_loss(probs, chosen, row_of_token, 3) + global_batch_aux_loss(probs, chosen, None)).backward()
    assert chosen.grad is None or chosen.grad.count_nonzero() == 0


@pytest.mark.parametrize("term", ["aux_loss", "z_loss"])
@pytest.mark.parametrize("kind", ["sequence", "global_batch"])
def test_descending_a_loss_through_the_gate_lowers_it(kind: str, term: str):
    torch.manual_seed(0)
    router = TopKRouter(hidden_size=8, num_experts=E, top_k=K)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(40, 8)

    def loss() -> Tensor:
        return getattr(Balancing(kind)(router(x), torch.arange(40) // 10, 4), term)

    before = loss()
    (gradient,) = torch.autograd.grad(before, router.weight)
    with torch.no_grad():
        router.weight.sub_(1e-3 * gradient / gradient.norm())
    assert loss().item() < before.item()


def test_z_loss_is_the_sum_of_squared_log_partition_functions():
    routing, row_of_token = random_routing([5, 0, 8])
    expected = sum(math.log(sum(math.exp(z) for z in token)) ** 2 for token in routing.logits_TE.tolist())
    assert Balancing()(routing, row_of_token, 3).z_loss.item() == pytest.approx(expected, rel=1e-5)


def test_entropy_is_summed_over_tokens_in_nats():
    logits = torch.zeros(4, E)
    logits[3] = torch.tensor([200.0] + [-200.0] * (E - 1))  # probabilities of exactly 1 and 0
    routing = Routing(torch.full((4, K), 0.5), torch.tensor([[0, 1]] * 4), logits)
    stats = Balancing()(routing, torch.zeros(4, dtype=torch.int64), 1)
    assert stats.entropy.item() == pytest.approx(3 * math.log(E), rel=1e-6)
    assert not stats.entropy.requires_grad


def test_counts_are_token_copies_per_expert():
    routing, row_of_token = random_routing([5, 0, 8])
    counts = Balancing()(routing, row_of_token, 3).tokens_per_expert_E
    assert counts.dtype == torch.int64
    assert counts.tolist() == [sum(e in t for t in routing.experts_TK.tolist()) for e in range(E)]


@pytest.mark.parametrize("kind", ["sequence", "global_batch", "none"])
def test_no_tokens_give_zeros_and_finite_gradients(kind: str):
    routing, row_of_token = random_routing([0, 0], requires_grad=True)
    stats: RouterStats = Balancing(kind)(routing, row_of_token, 2)
    assert [value.sum().item() for value in stats] == [0, 0, 0, 0]
    (stats.aux_loss + stats.z_loss).backward()
    assert routing.logits_TE.grad is not None
