import pytest
import torch

from tests.distributed.dispatch_jobs import D, E, Exchange, Tensors, on_one_process, on_this_rank, two_in_flight
from tests.helpers.pool import RankPool

ALL = tuple(range(E))
EXCHANGES = [
    Exchange((5, 9), ALL),
    Exchange((0, 7), ALL),
    Exchange((6, 4), (0, 1, 2, 3)),  # rank 1 receives nothing
    Exchange((6, 4), (5, 6)),  # rank 0 receives nothing, and most experts are idle
    Exchange((0, 0), ALL),
    Exchange((5, 0, 9, 3), ALL),
    Exchange((1, 12, 0, 0), (0, 3, 7)),  # rank 2's experts are idle
    Exchange((4, 4, 4, 4), (6, 7)),
    Exchange((0, 0, 0, 0), ALL),
]


def assert_equal(per_rank: list[Tensors], expected: Tensors) -> None:
    """The ranks' tokens and experts, one after another, are those of one process, up to float64's rounding."""
    for name, wanted in vars(expected).items():
        whole = torch.cat([getattr(tensors, name) for tensors in per_rank])
        torch.testing.assert_close(whole, wanted, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
def test_all_to_all_equals_local_dispatch_with_all_experts(ranks: RankPool, exchange: Exchange):
    per_rank = ranks.run(on_this_rank, len(exchange.tokens), exchange)
    assert_equal(per_rank, on_one_process(exchange))


def test_idle_experts_have_gradients_of_exactly_zero(ranks: RankPool):
    exchange = Exchange((6, 4), (5, 6))
    per_rank = ranks.run(on_this_rank, 2, exchange)
    for kind in ("gate_up_grad", "down_grad"):
        gradient = torch.cat([getattr(tensors, kind) for tensors in per_rank])
        assert gradient.flatten(1).any(dim=1).nonzero().flatten().tolist() == [5, 6]


def test_a_dispatcher_is_used_again_without_a_trace_of_the_last_batch(ranks: RankPool):
    exchange = Exchange((3, 8), ALL)
    assert_equal(ranks.run(on_this_rank, 2, exchange, num_exchanges=3), on_one_process(exchange))


def test_two_batches_in_flight_do_not_mix(ranks: RankPool):
    assert ranks.run(two_in_flight, 2, Exchange((3, 8), ALL), Exchange((5, 0), ALL, seed=1)) == [True, True]


def test_shapes_of_a_rank_without_tokens(ranks: RankPool):
    idle = ranks.run(on_this_rank, 2, Exchange((0, 7), ALL))[0]
    assert idle.y.shape == idle.x_grad.shape == (0, D)
    assert idle.tokens_per_expert.shape == (E // 2,)
