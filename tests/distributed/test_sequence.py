"""The pieces of tensor parallelism, each against one process: sequence, vocabulary, and experts shared in width."""

import pytest
import torch
import torch.nn.functional as F

from tests.distributed import sequence_jobs as jobs
from tests.helpers.pool import RankPool
from tests.unit.model.builders import relative_difference


@pytest.mark.parametrize("size", [2, 4])
def test_gathering_and_scattering_a_sequence_are_each_others_transpose(ranks: RankPool, size: int):
    torch.manual_seed(size)
    whole, cotangents = torch.randn(3, 8, 5), torch.randn(size, 3, 8, 5)
    summed = cotangents.sum(0).chunk(size, dim=1)
    for rank, (gathered, gradient, scattered, back) in enumerate(
        ranks.run(jobs.gather_and_scatter, size, whole, cotangents)
    ):
        assert torch.equal(gathered, whole)
        assert torch.equal(back, whole)
        torch.testing.assert_close(gradient, summed[rank])
        torch.testing.assert_close(scattered, summed[rank])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_loss_over_parts_of_the_vocabulary_equals_cross_entropy(ranks: RankPool, size: int, offset: float):
    torch.manual_seed(0)
    logits, targets = 5 * torch.randn(2, 6, 13) + offset, torch.randint(0, 13, (2, 6))
    targets[0, :2] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="sum")
    (3.0 * expected).backward()
    assert whole.grad is not None
    shares, gradients = zip(*ranks.run(jobs.loss_and_gradient, size, logits, targets, torch.float32), strict=True)
    assert all(torch.equal(share, shares[0]) for share in shares)
    assert sum(share.item() for share in shares) == pytest.approx(expected.item(), rel=1e-5)
    assert relative_difference(torch.cat(gradients, dim=-1), whole.grad) < 1e-5
    assert torch.cat(gradients, dim=-1)[0, :2].count_nonzero() == 0


def test_loss_of_bf16_logits_is_computed_in_fp32(ranks: RankPool):
    torch.manual_seed(1)
    logits, targets = 5 * torch.randn(2, 64, 13).bfloat16(), torch.randint(0, 13, (2, 64))
    whole = logits.float().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="sum")
    (3.0 * expected).backward()
    assert whole.grad is not None
    shares, gradients = zip(*ranks.run(jobs.loss_and_gradient, 2, logits, targets, torch.bfloat16), strict=True)
    assert sum(share.item() for share in shares) == pytest.approx(expected.item(), rel=1e-5)
    # Rounded to bf16 once, at the end.
    assert torch.equal(torch.cat(gradients, dim=-1), whole.grad.bfloat16())


def test_loss_without_any_target_is_zero(ranks: RankPool):
    targets = torch.full((1, 4), -100)
    for share, gradient in ranks.run(jobs.loss_and_gradient, 2, torch.randn(1, 4, 13), targets, torch.float32):
        assert share == 0
        assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_an_embedding_add_up_to_the_whole(ranks: RankPool, size: int):
    torch.manual_seed(0)
    table, tokens, cotangent = torch.randn(13, 3), torch.randint(0, 13, (2, 9)), torch.randn(2, 9, 3)
    whole = table.clone().requires_grad_()
    F.embedding(tokens, whole).backward(cotangent)
    assert whole.grad is not None
    rows, gradients = zip(*ranks.run(jobs.embedding_and_gradient, size, table, tokens, cotangent), strict=True)
    assert torch.equal(torch.stack(rows).sum(0), F.embedding(tokens, table))
    torch.testing.assert_close(torch.cat(gradients), whole.grad)


def test_each_rank_routes_its_own_positions(ranks: RankPool):
    # Rows of 8: the second has 3 tokens, the third none.
    valid = torch.tensor([*range(8), 8, 9, 10])
    first, second = ranks.run(jobs.tokens_of_rank, 2, (3, 8), valid)
    assert (first[0].tolist(), first[1].tolist(), first[2]) == ([0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1, 1], 3)
    assert (second[0].tolist(), second[1].tolist(), second[2]) == ([0, 1, 2, 3], [0, 0, 0, 0], 3)
    for index, rows, num_rows in ranks.run(jobs.tokens_of_rank, 2, (3, 8), None):
        assert index is None
        assert rows.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert num_rows == 3


@pytest.mark.parametrize("size", [2, 4])
def test_slices_of_experts_add_up_to_whole_experts(ranks: RankPool, size: int):
    torch.manual_seed(size)
    num_experts, top_k, hidden, width = 4, 2, 6, 8
    counts = [5, 0, 3, 1][:size]  # a rank without tokens is normal
    tokens, cotangents = ([torch.randn(count, hidden) for count in counts] for _ in range(2))
    probs = [torch.rand(count, top_k) for count in counts]
    experts = [torch.rand(count, num_experts - 1).topk(top_k).indices for count in counts]  # the last one is idle
    weights = torch.randn(num_experts, hidden, 2, width)
    results = ranks.run(jobs.through_sliced_experts, size, tokens, probs, experts, weights, cotangents)
    for rank, (y, x_gradient, p_gradient) in enumerate(results):
        x, p = tokens[rank].clone().requires_grad_(), probs[rank].clone().requires_grad_()
        up, down = weights.unbind(2)
        hidden_TKF = F.relu(torch.einsum("td,tkdf->tkf", x, up[experts[rank]]))
        expected = torch.einsum("tkf,tkdf,tk->td", hidden_TKF, down[experts[rank]], p)
        expected.backward(cotangents[rank])
        torch.testing.assert_close(y, expected.detach())
        torch.testing.assert_close(x_gradient, x.grad)
        torch.testing.assert_close(p_gradient, p.grad)
