"""The benchmark's dispatchers: both give the plain formula's result, and send the bytes that the formula says."""

import pytest
import torch
import torch.distributed as dist

from moe_framework.moe.dispatch.all_to_all import AllToAllDispatcher
from moe_framework.moe.dispatch.base import Dispatched
from tests.helpers.pool import RankPool, RanksFailedError
from tools.benchmarks import dispatch
from tools.benchmarks.all_gather import AllGatherDispatcher
from tools.benchmarks.dispatch import DispatchCase, DispatchResult, ExchangeProblem, exchange, make_problem

CPU = torch.device("cpu")


def case_of(ep: int, top_k: int = 3) -> DispatchCase:
    return DispatchCase(
        ep=ep, num_tokens=17, hidden_size=24, num_experts=8, top_k=top_k, dtypes=("fp32", "bf16"), seed=5
    )


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def expected(problem: ExchangeProblem, num_experts: int) -> tuple[torch.Tensor, ...]:
    """Each token times the sum of its weights times their experts' constants, without any exchange."""
    constants_TK = 1 + problem.experts_TK / num_experts
    factor_T = (problem.probs_TK * constants_TK).sum(1, keepdim=True)
    y_TD = problem.x_TD * factor_T
    return y_TD.detach(), *torch.autograd.grad(y_TD, (problem.x_TD, problem.probs_TK), problem.cotangent_TD)


def largest_errors(*, starved: bool) -> list[float]:
    """Relative errors of both dispatchers; with `starved`, all tokens go to one expert of the first rank."""
    group = world()
    case = case_of(group.size(), top_k=1 if starved else 3)
    problem = make_problem(case, group.rank(), CPU)
    if starved:
        problem = problem._replace(experts_TK=torch.zeros_like(problem.experts_TK))
    errors = []
    for kind in (AllToAllDispatcher, AllGatherDispatcher):
        found = exchange(kind(num_experts=case.num_experts, group=group), problem)
        wanted = expected(problem, case.num_experts)
        errors += [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    return errors


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("starved", [False, True])
def test_both_dispatchers_equal_the_sum_without_an_exchange(ranks: RankPool, ep: int, starved: bool):
    for errors in ranks.run(largest_errors, ep, starved=starved):
        # Sums of 3 terms, and of 24 in a weight's gradient, in another order.
        assert max(errors) < 24 * torch.finfo(torch.float32).eps


def compare() -> list[DispatchResult]:
    group = world()
    return dispatch.compare_dispatch(
        case_of(group.size()), group, CPU, warmup=1, repetitions=2, on_repetition=lambda dtype: None
    )


@pytest.mark.parametrize("ep", [2, 4])
def test_comparison_counts_bytes_and_times_each_dtype(ranks: RankPool, ep: int):
    by_rank = ranks.run(compare, ep)
    assert all(results == by_rank[0] for results in by_rank)
    fp32, bf16 = by_rank[0]
    assert (fp32.ep, fp32.dtype, bf16.dtype) == (ep, "fp32", "bf16")
    for result in (fp32, bf16):
        assert result.all_gather_over_all_to_all_seconds.median > 0
        total = sum(result.bytes_sent["all_to_all"].values())
        assert result.max_bytes_sent["all_to_all"] >= total
        assert result.all_gather_over_all_to_all_bytes == sum(result.bytes_sent["all_gather"].values()) / total
    # Rows alone shrink by half.
    assert 1.5 < sum(fp32.bytes_sent["all_to_all"].values()) / sum(bf16.bytes_sent["all_to_all"].values()) < 2


class MisroutingDispatcher(AllGatherDispatcher):
    """Gives two rows of different experts each other's places."""

    def dispatch(self, x_TD: torch.Tensor, probs_TK: torch.Tensor, experts_TK: torch.Tensor) -> Dispatched:
        dispatched = super().dispatch(x_TD, probs_TK, experts_TK)
        swapped = torch.arange(dispatched.rows_RD.shape[0])
        swapped[[0, -1]] = swapped[[-1, 0]]
        handle = dispatched.handle._replace(token_R=dispatched.handle.token_R[swapped])
        return dispatched._replace(
            rows_RD=dispatched.rows_RD[swapped], probs_R=dispatched.probs_R[swapped], handle=handle
        )


def compare_with_misrouting() -> None:
    original = dispatch.AllGatherDispatcher
    dispatch.AllGatherDispatcher = MisroutingDispatcher
    try:
        compare()
    finally:
        dispatch.AllGatherDispatcher = original


def compare_with_wrong_formula() -> None:
    original = dispatch.all_gather_traffic
    dispatch.all_gather_traffic = lambda *args, **kwargs: original(*args, **kwargs)._replace(backward=1)
    try:
        compare()
    finally:
        dispatch.all_gather_traffic = original


def test_a_row_at_the_wrong_expert_stops_every_rank(ranks: RankPool):
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(compare_with_misrouting, 2)
    assert str(caught.value).count("AssertionError: DispatchCase(") == 2
    assert "the dispatchers differ by" in str(caught.value)


def test_a_wrong_byte_formula_stops_every_rank(ranks: RankPool):
    with pytest.raises(RanksFailedError) as caught:
        ranks.run(compare_with_wrong_formula, 2)
    assert "the formula misses" in str(caught.value)
