"""All-to-all against all-gather: dispatch and combine, forward and backward, between started ranks.

The experts between dispatch and combine compute next to nothing: they multiply each row by its weight and by a
constant of its expert, so that a row that reaches the wrong expert changes the result.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_framework.moe.dispatch.all_to_all import AllToAllDispatcher
from moe_framework.moe.dispatch.base import TokenDispatcher
from moe_framework.precision.policy import DTYPES
from tools.benchmarks.all_gather import AllGatherDispatcher
from tools.benchmarks.timing import Spread, interleave, ratio
from tools.benchmarks.traffic import SentBytes, Traffic, all_gather_traffic, all_to_all_traffic


@dataclass(frozen=True)
class DispatchCase:
    """One comparison.

    Attributes:
        ep: Ranks of the expert-parallel group.
        num_tokens: Tokens T of each rank.
        hidden_size: D.
        num_experts: E over all ranks.
        top_k: K.
        dtypes: Of the tokens, names in `DTYPES`; each is timed.
        seed: Of tokens and routing; each rank draws its own.
    """

    ep: int
    num_tokens: int
    hidden_size: int
    num_experts: int
    top_k: int
    dtypes: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class DispatchResult:
    """What one comparison found, for one dtype.

    Attributes:
        ep: Ranks.
        dtype: Name, such as `bf16`.
        bytes_sent: Bytes sent to other ranks, mean over the ranks, by dispatcher and direction.
        max_bytes_sent: Of the rank that sends most, forward and backward together, by dispatcher.
        seconds: Time of one forward and backward of the slowest rank, by dispatcher.
        all_gather_over_all_to_all_bytes: Quotient of the means, forward and backward together.
        all_gather_over_all_to_all_seconds: Quotient of the times in the same repetition.
        max_relative_difference: Largest ‖a−b‖/‖a‖ in float32 of output and gradients between the two, on any rank.
    """

    ep: int
    dtype: str
    bytes_sent: dict[str, dict[str, float]]
    max_bytes_sent: dict[str, int]
    seconds: dict[str, Spread]
    all_gather_over_all_to_all_bytes: float
    all_gather_over_all_to_all_seconds: Spread
    max_relative_difference: float


class ExchangeProblem(NamedTuple):
    """This rank's tokens and routing, the constants of its experts, and the gradient of its result."""

    x_TD: Tensor
    probs_TK: Tensor
    experts_TK: Tensor
    constants_e: Tensor
    cotangent_TD: Tensor

    def to(self, dtype: torch.dtype) -> "ExchangeProblem":
        """Return the problem with tokens and gradient in another dtype."""
        x_TD = self.x_TD.detach().to(dtype).requires_grad_()
        return self._replace(x_TD=x_TD, cotangent_TD=self.cotangent_TD.to(dtype))


def make_problem(case: DispatchCase, ep_rank: int, device: torch.device) -> ExchangeProblem:
    """Draw one rank's tokens, in float32, and a routing in which each chooses K different experts uniformly."""
    generator = torch.Generator().manual_seed(case.seed * case.ep + ep_rank)
    x_TD = torch.randn(case.num_tokens, case.hidden_size, generator=generator)
    probs_TK, experts_TK = torch.rand(case.num_tokens, case.num_experts, generator=generator).topk(case.top_k)
    cotangent_TD = torch.randn(case.num_tokens, case.hidden_size, generator=generator)
    constants_E = 1 + torch.arange(case.num_experts) / case.num_experts
    return ExchangeProblem(
        x_TD.to(device).requires_grad_(),
        probs_TK.to(device).requires_grad_(),
        experts_TK.to(device),
        constants_E.chunk(case.ep)[ep_rank].to(device),
        cotangent_TD.to(device),
    )


def exchange(dispatcher: TokenDispatcher, problem: ExchangeProblem) -> tuple[Tensor, ...]:
    """Dispatch, weight, combine, and differentiate.

    Args:
        dispatcher: Either of the two.
        problem: This rank's part.

    Returns:
        The result [T, D], and the gradients of the tokens and of the weights.

    Collective: the dispatcher's group; every rank must call.
    """
    x_TD, probs_TK, experts_TK, constants_e, cotangent_TD = problem
    rows_RD, probs_R, tokens_per_expert, handle = dispatcher.dispatch(x_TD, probs_TK, experts_TK)
    constants_R = constants_e.repeat_interleave(tokens_per_expert, output_size=rows_RD.shape[0])
    weighted_RD = rows_RD * (probs_R * constants_R).to(rows_RD.dtype)[:, None]
    y_TD = dispatcher.combine(weighted_RD, handle)
    return y_TD.detach(), *torch.autograd.grad(y_TD, (x_TD, probs_TK), cotangent_TD)


def difference_bound(case: DispatchCase) -> float:
    """Largest relative difference in float32 that rounding explains.

    A result sums at most K non-zero terms, of equal sign up to that of the token, in an order that differs between
    the two: K-1 roundings of half an eps in each. A weight's gradient is the same sum of D terms in both.
    """
    return (case.top_k - 1) * torch.finfo(torch.float32).eps


def compare_dispatch(
    case: DispatchCase,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    warmup: int,
    repetitions: int,
    on_repetition: Callable[[str], object],
) -> list[DispatchResult]:
    """Check in float32 that both dispatchers agree and send the computed bytes, then time them in turn.

    Args:
        case: What to exchange.
        group: The expert-parallel group; `case.ep` ranks.
        device: This rank's.
        warmup: Repetitions that are not kept.
        repetitions: Repetitions that are.
        on_repetition: Called with the dtype after each, warm-up included.

    Returns:
        One result for each dtype, the same on every rank.

    Raises:
        AssertionError: The two differ by more than rounding, or the byte formula is wrong; on every rank.

    Collective: `group`; every rank must call.
    """
    problem = make_problem(case, group.rank(), device)
    dispatchers: dict[str, TokenDispatcher] = {
        "all_to_all": AllToAllDispatcher(num_experts=case.num_experts, group=group),
        "all_gather": AllGatherDispatcher(num_experts=case.num_experts, group=group),
    }
    difference = check(case, dispatchers, problem, group)
    results = []
    for dtype in case.dtypes:
        cast = problem.to(DTYPES[dtype])
        samples = interleave(
            {name: lambda d=dispatcher, p=cast: exchange(d, p) for name, dispatcher in dispatchers.items()},
            device,
            warmup=warmup,
            repetitions=repetitions,
            # Ranks that start together: else a rank's time holds its wait for the others.
            before_each=lambda: dist.barrier(group),
            after_repetition=lambda dtype=dtype: on_repetition(dtype),
        )
        seconds = {name: slowest(times, group, device) for name, times in samples.items()}
        results.append(summarise(case, dtype, seconds, traffic_of_all_ranks(case, problem, dtype, group), difference))
    return results


def check(
    case: DispatchCase,
    dispatchers: dict[str, TokenDispatcher],
    problem: ExchangeProblem,
    group: dist.ProcessGroup,
) -> float:
    """Run each dispatcher once in float32; compare their results, and their bytes with the formula.

    Returns:
        The largest relative difference on any rank.

    Raises:
        AssertionError: See `compare_dispatch`.

    Collective: `group`; every rank must call.
    """
    computed = traffic(case, problem, "fp32", group)
    results = {}
    wrong_bytes = 0.0
    for name, dispatcher in dispatchers.items():
        with SentBytes(group.rank()) as counted:
            results[name] = exchange(dispatcher, problem)
        wrong_bytes += abs(counted.total - computed[name].total)
    differences = [
        ((a - b).norm() / a.norm()).double() for a, b in zip(results["all_to_all"], results["all_gather"], strict=True)
    ]
    worst = torch.stack([*differences, torch.full_like(differences[0], wrong_bytes)])
    # The worst rank's, so that all ranks stop together.
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    *shared_differences, shared_wrong_bytes = worst.tolist()
    assert shared_wrong_bytes == 0, f"{case}: the formula misses {shared_wrong_bytes:.0f} bytes"
    largest = max(shared_differences)
    assert largest <= difference_bound(case), f"{case}: the dispatchers differ by {largest:.2g}"
    return largest


def traffic(case: DispatchCase, problem: ExchangeProblem, dtype: str, group: dist.ProcessGroup) -> dict[str, Traffic]:
    """Bytes that this rank sends, by dispatcher, from the splits of the actual routing.

    Collective: `group`; every rank must call.
    """
    row_bytes = case.hidden_size * DTYPES[dtype].itemsize
    owner_N = problem.experts_TK.flatten() // (case.num_experts // case.ep)
    sent = torch.stack([(owner_N == ep_rank).sum() for ep_rank in range(case.ep)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return {
        "all_to_all": all_to_all_traffic(
            sent.tolist(), received.tolist(), group.rank(), num_experts=case.num_experts, row_bytes=row_bytes
        ),
        "all_gather": all_gather_traffic(case.num_tokens, ep=case.ep, top_k=case.top_k, row_bytes=row_bytes),
    }


def traffic_of_all_ranks(
    case: DispatchCase, problem: ExchangeProblem, dtype: str, group: dist.ProcessGroup
) -> list[dict[str, Traffic]]:
    """Return what `traffic` says on each rank.

    Collective: `group`; every rank must call.
    """
    by_rank: list[dict[str, Traffic]] = [{} for _ in range(case.ep)]
    dist.all_gather_object(by_rank, traffic(case, problem, dtype, group), group=group)
    return by_rank


def slowest(times: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Return, for each repetition, the seconds of the slowest rank.

    Collective: `group`; every rank must call.
    """
    tensor = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def summarise(
    case: DispatchCase,
    dtype: str,
    seconds: dict[str, list[float]],
    by_rank: list[dict[str, Traffic]],
    difference: float,
) -> DispatchResult:
    """Reduce repetitions to spreads, and ranks to their mean and maximum."""
    mean_bytes = {
        name: {
            "forward": sum(sent[name].forward for sent in by_rank) / case.ep,
            "backward": sum(sent[name].backward for sent in by_rank) / case.ep,
        }
        for name in seconds
    }
    totals = {name: sum(directions.values()) for name, directions in mean_bytes.items()}
    return DispatchResult(
        ep=case.ep,
        dtype=dtype,
        bytes_sent=mean_bytes,
        max_bytes_sent={name: max(sent[name].total for sent in by_rank) for name in seconds},
        seconds={name: Spread.of(times) for name, times in seconds.items()},
        all_gather_over_all_to_all_bytes=totals["all_gather"] / totals["all_to_all"],
        all_gather_over_all_to_all_seconds=ratio(seconds["all_gather"], seconds["all_to_all"]),
        max_relative_difference=difference,
    )
