"""The comparison of expert backends: same inputs for both, and a difference beyond rounding is found."""

from dataclasses import replace

import pytest
import torch

from moe_framework.moe.experts.loop import loop_experts
from tools.benchmarks import experts
from tools.benchmarks.experts import ExpertsCase, compare_experts, forward_backward, make_problem, reason_to_skip

CPU = torch.device("cpu")
CASE = ExpertsCase(num_tokens=24, hidden_size=16, intermediate_size=8, num_experts=4, top_k=2, dtype="fp32", seed=0)


def compare(case: ExpertsCase) -> experts.ExpertsResult:
    return compare_experts(case, CPU, warmup=1, repetitions=2, on_repetition=lambda: None)


def test_flop_is_that_of_torchs_counter():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        forward_backward(loop_experts, make_problem(CASE, CPU))
    assert counter.get_total_flops() == CASE.flop


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_result_has_a_time_for_each_backend_and_their_ratio(dtype: str):
    result = compare(replace(CASE, dtype=dtype))
    assert (result.num_experts, result.dtype, result.rows) == (4, dtype, 48)
    assert result.loop_over_grouped_mm.median > 0
    for name in ("loop", "grouped_mm"):
        assert result.gflop_per_s[name] == pytest.approx(result.gflop / result.seconds[name].median)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_backend_that_differs_beyond_rounding_is_refused(dtype: str, monkeypatch: pytest.MonkeyPatch):
    case = replace(CASE, dtype=dtype)
    error = 2 * experts.difference_bound(case)
    monkeypatch.setattr(experts, "grouped_mm_experts", lambda *args: loop_experts(*args) * (1 + error))
    with pytest.raises(AssertionError, match="the backends differ by"):
        compare(case)


def test_each_token_chooses_different_experts_and_the_seed_fixes_the_problem():
    first, again = make_problem(CASE, CPU), make_problem(CASE, CPU)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    everywhere = make_problem(replace(CASE, top_k=4), CPU)
    assert everywhere.tokens_per_expert.tolist() == [24, 24, 24, 24]


def test_sizes_that_grouped_mm_cannot_compute_have_a_reason():
    assert reason_to_skip(CASE, CPU) is None
    assert "hidden_size=6" in (reason_to_skip(replace(CASE, hidden_size=6), CPU) or "")
