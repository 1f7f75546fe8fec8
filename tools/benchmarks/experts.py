"""Expert backends against each other: forward and backward on the same rows, weights and routing."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_framework.moe.experts.base import ExpertBackend
from moe_framework.moe.experts.grouped_mm import grouped_mm_experts, unsupported_reason
from moe_framework.moe.experts.loop import loop_experts
from moe_framework.moe.permute import expert_order
from moe_framework.precision.policy import DTYPES
from tools.benchmarks.timing import Spread, interleave, ratio

BACKENDS: dict[str, ExpertBackend] = {"loop": loop_experts, "grouped_mm": grouped_mm_experts}


@dataclass(frozen=True)
class ExpertsCase:
    """One comparison.

    Attributes:
        num_tokens: T; the experts get R = T·K rows.
        hidden_size: D.
        intermediate_size: F.
        num_experts: E, all on one rank.
        top_k: K.
        dtype: Of weights and rows, a name in `DTYPES`.
        seed: Of weights, rows and routing.
    """

    num_tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    dtype: str
    seed: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]

    @property
    def flop(self) -> float:
        """Floating-point operations of the matrix products: 6·R·D·F forward, twice that backward."""
        return 18.0 * self.num_tokens * self.top_k * self.hidden_size * self.intermediate_size


@dataclass(frozen=True)
class ExpertsResult:
    """What one comparison found.

    Attributes:
        num_experts: E.
        dtype: Name, such as `bf16`.
        rows: Rows R = T·K.
        gflop: Of one forward and backward.
        seconds: Time of one forward and backward, by backend.
        gflop_per_s: At the median time, by backend.
        loop_over_grouped_mm: Time of `loop` over that of `grouped_mm` in the same repetition.
        max_relative_difference: Largest ‖a−b‖/‖a‖ of output and gradients between the two backends.
    """

    num_experts: int
    dtype: str
    rows: int
    gflop: float
    seconds: dict[str, Spread]
    gflop_per_s: dict[str, float]
    loop_over_grouped_mm: Spread
    max_relative_difference: float


class ExpertsProblem(NamedTuple):
    """The arguments of a backend, and the gradient of its output."""

    gate_up: Tensor
    down: Tensor
    rows_RD: Tensor
    probs_R: Tensor
    tokens_per_expert: Tensor
    cotangent_RD: Tensor


def make_problem(case: ExpertsCase, device: torch.device) -> ExpertsProblem:
    """Draw weights, rows and a routing in which each token chooses K different experts uniformly.

    Args:
        case: Sizes, dtype and seed.
        device: Where to put them.

    Returns:
        The tensors; those that a backend differentiates require gradients.
    """
    generator = torch.Generator(device).manual_seed(case.seed)
    width, inner = case.hidden_size, case.intermediate_size

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, device=device, dtype=case.torch_dtype)

    scores_TE = torch.rand(case.num_tokens, case.num_experts, generator=generator, device=device)
    experts_TK = scores_TE.topk(case.top_k).indices
    num_rows = experts_TK.numel()
    return ExpertsProblem(
        draw(case.num_experts, 2 * inner, width, scale=width**-0.5).requires_grad_(),
        draw(case.num_experts, width, inner, scale=inner**-0.5).requires_grad_(),
        draw(num_rows, width).requires_grad_(),
        torch.rand(num_rows, generator=generator, device=device).requires_grad_(),
        expert_order(experts_TK, case.num_experts).tokens_per_expert_E,
        draw(num_rows, width),
    )


def forward_backward(backend: ExpertBackend, problem: ExpertsProblem) -> tuple[Tensor, ...]:
    """Return the output of a backend and its gradients by gate_up, down, rows and probs."""
    *arguments, cotangent_RD = problem
    out_RD = backend(*arguments)
    return out_RD.detach(), *torch.autograd.grad(out_RD, arguments[:4], cotangent_RD)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖, computed in float64."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm())


def difference_bound(case: ExpertsCase) -> float:
    """Largest relative difference that rounding explains.

    At most four values in a row are rounded to the dtype, by half an eps each. Sums are in float32 and in any
    order: their error grows with the square root of the number of terms, at most the rows R or the widths.
    """
    terms = max(case.num_tokens * case.top_k, 2 * case.intermediate_size, case.hidden_size)
    return 2 * torch.finfo(case.torch_dtype).eps + math.sqrt(terms) * torch.finfo(torch.float32).eps


def compare_experts(
    case: ExpertsCase, device: torch.device, *, warmup: int, repetitions: int, on_repetition: Callable[[], object]
) -> ExpertsResult:
    """Check that the backends agree, then time them in turn.

    Args:
        case: What to compute.
        device: Where.
        warmup: Repetitions that are not kept.
        repetitions: Repetitions that are.
        on_repetition: Called after each, warm-up included.

    Returns:
        Times and difference.

    Raises:
        AssertionError: The backends differ by more than rounding.
    """
    problem = make_problem(case, device)
    expected = forward_backward(loop_experts, problem)
    actual = forward_backward(grouped_mm_experts, problem)
    difference = max(relative_difference(a, b) for a, b in zip(actual, expected, strict=True))
    assert difference <= difference_bound(case), f"{case}: the backends differ by {difference:.2g}"

    runs = {name: lambda backend=backend: forward_backward(backend, problem) for name, backend in BACKENDS.items()}
    samples = interleave(runs, device, warmup=warmup, repetitions=repetitions, after_repetition=on_repetition)
    seconds = {name: Spread.of(times) for name, times in samples.items()}
    return ExpertsResult(
        num_experts=case.num_experts,
        dtype=case.dtype,
        rows=problem.rows_RD.shape[0],
        gflop=case.flop / 1e9,
        seconds=seconds,
        gflop_per_s={name: case.flop / 1e9 / spread.median for name, spread in seconds.items()},
        loop_over_grouped_mm=ratio(samples["loop"], samples["grouped_mm"]),
        max_relative_difference=difference,
    )


def reason_to_skip(case: ExpertsCase, device: torch.device) -> str | None:
    """Say why `grouped_mm` cannot compute a case; None if it can."""
    return unsupported_reason(
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        dtype=case.torch_dtype,
        device_type=device.type,
    )
