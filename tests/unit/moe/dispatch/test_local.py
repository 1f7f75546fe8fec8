import torch

from moe_framework.moe.dispatch.local import LocalDispatcher


def test_rows_and_weights_arrive_grouped_by_expert():
    x = torch.tensor([[10.0], [20.0], [30.0]])
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]])
    experts = torch.tensor([[3, 0], [0, 1], [3, 1]])
    sent = LocalDispatcher(num_experts=4).dispatch(x, probs, experts)
    assert sent.tokens_per_expert.tolist() == [2, 2, 0, 2]
    assert sent.rows_RD.flatten().tolist() == [10, 20, 20, 30, 10, 30]
    torch.testing.assert_close(sent.probs_R, torch.tensor([0.1, 0.8, 0.2, 0.3, 0.9, 0.7]))


def test_combine_sums_the_experts_results_per_token():
    torch.manual_seed(0)
    x = torch.randn(20, 3, dtype=torch.float64)
    probs, experts = torch.rand(20, 5, dtype=torch.float64).topk(2)
    scale = torch.randn(5, dtype=torch.float64)  # expert e multiplies by scale[e]
    dispatcher = LocalDispatcher(num_experts=5)
    sent = dispatcher.dispatch(x, probs, experts)
    expert_of_row = torch.repeat_interleave(torch.arange(5), sent.tokens_per_expert)
    results = sent.rows_RD * (sent.probs_R * scale[expert_of_row])[:, None]
    expected = torch.stack([x[t] * sum(probs[t, k] * scale[experts[t, k]] for k in range(2)) for t in range(20)])
    torch.testing.assert_close(dispatcher.combine(results, sent.handle), expected)


def test_gradients_reach_tokens_and_weights():
    torch.manual_seed(0)
    experts = torch.rand(6, 4).topk(2).indices
    dispatcher = LocalDispatcher(num_experts=4)

    def both_ways(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        sent = dispatcher.dispatch(x, probs, experts)
        return dispatcher.combine(sent.rows_RD.square() * sent.probs_R[:, None], sent.handle)

    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(both_ways, (x, probs))


def test_two_batches_in_flight_do_not_mix():
    dispatcher = LocalDispatcher(num_experts=3)
    first = dispatcher.dispatch(torch.ones(2, 1), torch.ones(2, 1), torch.tensor([[2], [0]]))
    second = dispatcher.dispatch(torch.full((3, 1), 5.0), torch.ones(3, 1), torch.tensor([[1], [1], [0]]))
    assert dispatcher.combine(first.rows_RD, first.handle).flatten().tolist() == [1, 1]
    assert dispatcher.combine(second.rows_RD, second.handle).flatten().tolist() == [5, 5, 5]


def test_no_tokens():
    dispatcher = LocalDispatcher(num_experts=3)
    sent = dispatcher.dispatch(torch.empty(0, 4), torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int64))
    assert sent.tokens_per_expert.tolist() == [0, 0, 0]
    assert dispatcher.combine(sent.rows_RD, sent.handle).shape == (0, 4)
