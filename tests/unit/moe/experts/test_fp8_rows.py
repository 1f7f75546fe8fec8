import pytest
import torch
from torch import Tensor

from moe_framework.moe.experts.base import scaled_swiglu
from moe_framework.moe.experts.fp8_rows import (
    ALIGNMENT,
    GRADIENTS,
    VALUES,
    Fp8Rows,
    cast_rows,
    cast_swiglu,
    cast_swiglu_gradient,
    transposed_groups,
)

COUNTS = [5, 0, 33, 16]
WIDTH = 24
# Half a unit in the last place of 3 and of 2 bits, and the float16 between.
ROUNDING = {VALUES: 2**-4 + 2**-11, GRADIENTS: 2**-3 + 2**-11}


def _rows(seed: int = 0) -> Tensor:
    return torch.randn(sum(COUNTS), WIDTH, generator=torch.Generator().manual_seed(seed))


def _values(cast: Fp8Rows) -> Tensor:
    return cast.rows.float() * torch.repeat_interleave(cast.factors[:, 0], torch.tensor(COUNTS))[:, None]


def _assert_rounded(cast: Fp8Rows, exact: Tensor) -> None:
    """Every value is its own, within half a unit in the last place or of the smallest number."""
    kind = cast.rows.dtype
    factor = torch.repeat_interleave(cast.factors[:, 0], torch.tensor(COUNTS))[:, None]
    smallest = factor * torch.finfo(kind).smallest_normal * 2.0 ** -(2 if kind == GRADIENTS else 3)
    allowed = torch.maximum(exact.abs() * ROUNDING[kind], smallest / 2 * (1 + 2**-10))
    assert ((_values(cast) - exact).abs() <= allowed).all()


@pytest.mark.parametrize("kind", [VALUES, GRADIENTS])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_values_are_rounded_and_each_experts_largest_becomes_the_formats(kind: torch.dtype, source: torch.dtype):
    x = (_rows() * torch.repeat_interleave(torch.tensor([1e-3, 1.0, 1e3, 1.0]), torch.tensor(COUNTS))[:, None]).to(
        source
    )
    cast = cast_rows(x, torch.tensor(COUNTS), kind)
    _assert_rounded(cast, x.float())
    for rows, count in zip(cast.rows.split(COUNTS), COUNTS, strict=True):
        assert not count or rows.float().abs().max() == torch.finfo(kind).max


def test_transposed_groups_are_the_rows_with_zeros_after_them():
    cast = cast_rows(_rows(), torch.tensor(COUNTS), VALUES)
    groups = list(transposed_groups(cast.transposed, WIDTH, COUNTS))
    assert [group.shape[1] for group in groups] == [16, 0, 48, 16]
    assert all(group.shape[1] % ALIGNMENT == 0 and group.is_contiguous() for group in groups)
    for group, rows in zip(groups, cast.rows.split(COUNTS), strict=True):
        assert torch.equal(group.float()[:, : rows.shape[0]], rows.float().t())
        assert not group.float()[:, rows.shape[0] :].any()


def test_transposed_groups_are_left_out_where_they_are_not_asked_for():
    whole, rows_only = (cast_rows(_rows(), torch.tensor(COUNTS), VALUES, transposed=t) for t in (True, False))
    assert torch.equal(whole.rows.float(), rows_only.rows.float())
    assert rows_only.transposed.numel() == 0


def test_swiglu_is_computed_before_it_is_rounded():
    gate_up, probs = torch.randn(sum(COUNTS), 2 * WIDTH).bfloat16(), torch.rand(sum(COUNTS))
    cast = cast_swiglu(gate_up, probs, torch.tensor(COUNTS))
    exact = cast_rows(scaled_swiglu(gate_up.float(), probs), torch.tensor(COUNTS), VALUES)
    assert torch.equal(cast.rows.float(), exact.rows.float())
    used = [0, 2, 3]
    assert torch.equal(cast.factors[used], exact.factors[used])
    assert list(transposed_groups(cast.transposed, WIDTH, COUNTS))[2].shape == (WIDTH, 48)


def test_the_gradient_of_swiglu_is_autograds():
    gate_up, probs = torch.randn(sum(COUNTS), 2 * WIDTH).bfloat16(), torch.rand(sum(COUNTS))
    grad = _rows(1).bfloat16()
    leaves = gate_up.float().requires_grad_(), probs.clone().requires_grad_()
    wanted, wanted_probs = torch.autograd.grad(scaled_swiglu(*leaves), leaves, grad.float())
    cast, grad_probs = cast_swiglu_gradient(grad, gate_up, probs, torch.tensor(COUNTS))
    assert cast.rows.dtype == GRADIENTS
    _assert_rounded(cast, wanted)
    torch.testing.assert_close(grad_probs, wanted_probs)
    assert next(transposed_groups(cast.transposed, 2 * WIDTH, COUNTS)).shape == (2 * WIDTH, 16)


def test_zeros_stay_zeros_and_the_smallest_numbers_do_not_overflow_the_scale():
    x = _rows()
    x[:5], x[5:38] = 0.0, x[5:38] * 1e-39
    x[6, 0] = 0.0
    cast = cast_rows(x, torch.tensor(COUNTS), VALUES)
    assert not _values(cast)[:5].any()
    assert _values(cast).isfinite().all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_is_seen_in_its_experts_results(bad: float):
    x = _rows()
    x[7, 3] = bad
    values = _values(cast_rows(x, torch.tensor(COUNTS), VALUES))
    assert not values[5:38].isfinite().all()
    assert values[:5].isfinite().all()
    assert values[38:].isfinite().all()
