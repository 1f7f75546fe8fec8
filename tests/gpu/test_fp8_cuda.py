"""The kernels that cast to FP8, against the same in plain torch on the CPU."""

import pytest
import torch
from torch import Tensor

from moe_framework.moe.experts.fp8_rows import (
    GRADIENTS,
    VALUES,
    Fp8Rows,
    cast_rows,
    cast_swiglu,
    cast_swiglu_gradient,
    transposed_groups,
)

pytestmark = pytest.mark.gpu

COUNTS = [[5, 0, 130, 17], [64, 0, 0, 64], [0, 0, 0, 1], [1000, 24, 0, 777], [3] * 100]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _assert_same(found: Fp8Rows, expected: Fp8Rows, counts: list[int], differing: float = 0.0) -> None:
    """Equal numbers, but for a share whose value before the rounding differs in its last bits."""
    used = [expert for expert, count in enumerate(counts) if count]
    torch.testing.assert_close(found.factors[used, 0].cpu(), expected.factors[used, 0], rtol=1e-6, atol=0.0)
    width = expected.rows.shape[1]
    pairs = [(found.rows, expected.rows)]
    pairs += zip(*(transposed_groups(cast.transposed, width, counts) for cast in (found, expected)), strict=True)
    different = sum((a.cpu().float() != b.float()).sum().item() for a, b in pairs)
    assert different <= differing * 2 * expected.rows.numel()


@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: str(counts[:4]))
@pytest.mark.parametrize("width", [48, 160, 512])
def test_kernels_equal_plain_torch(counts: list[int], width: int):
    rows, experts = sum(counts), torch.tensor(counts)
    probs = torch.rand(rows, generator=torch.Generator().manual_seed(rows))
    gate_up, grad, x = _random(rows, 2 * width).bfloat16(), _random(rows, width).bfloat16(), _random(rows, width)
    for source in (x, x.bfloat16()):
        for kind in (VALUES, GRADIENTS):
            expected = cast_rows(source, experts, kind)
            _assert_same(cast_rows(source.cuda(), experts.cuda(), kind), expected, counts, 1e-4)
    # The exponential of the sigmoid may differ in its last bit.
    expected = cast_swiglu(gate_up, probs, experts)
    _assert_same(cast_swiglu(gate_up.cuda(), probs.cuda(), experts.cuda()), expected, counts, 1e-3)
    expected, grad_probs = cast_swiglu_gradient(grad, gate_up, probs, experts)
    found, found_probs = cast_swiglu_gradient(grad.cuda(), gate_up.cuda(), probs.cuda(), experts.cuda())
    _assert_same(found, expected, counts, 1e-3)
    torch.testing.assert_close(found_probs.cpu(), grad_probs, rtol=1e-4, atol=1e-4)


def test_transposed_groups_are_the_rows_of_the_same_call():
    counts = [700, 1, 0, 323]
    x = torch.randn(sum(counts), 512, device="cuda")
    cast = cast_rows(x, torch.tensor(counts, device="cuda"), GRADIENTS)
    for group, rows in zip(transposed_groups(cast.transposed, 512, counts), cast.rows.split(counts), strict=True):
        assert torch.equal(group.float()[:, : rows.shape[0]], rows.float().t())
        assert not group.float()[:, rows.shape[0] :].any()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_is_seen_in_its_experts_results(bad: float):
    x = torch.randn(64, 32, device="cuda")
    x[7, 3] = bad
    cast = cast_rows(x, torch.tensor([32, 32], device="cuda"), VALUES)
    values = cast.rows.float() * torch.repeat_interleave(cast.factors[:, 0], 32)[:, None]
    assert not values[:32].isfinite().all()
    assert values[32:].isfinite().all()
