import math

import pytest
import torch
from torch import nn

from moe_framework.optim.adamw import AdamW
from moe_framework.optim.clip import global_grad_norm


def random_parameters(scale: float = 1.0) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((4, 5), (7,), (2, 3, 4))]
    for parameter in parameters:
        parameter.grad = scale * torch.randn(parameter.shape)
    return parameters


def adamw(parameters: list[nn.Parameter], compiled: bool = False) -> AdamW:
    return AdamW(parameters, lr=0.1, weight_decay=0.1, eps=1e-2, compiled=compiled)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("clip_norm", [0.5, 3.0])
def test_equals_torchs_clipping_before_the_update(scale: float, clip_norm: float):
    ours, theirs = random_parameters(scale), random_parameters(scale)
    norm = global_grad_norm(ours)
    adamw(ours).step_clipped(norm, clip_norm)
    expected = nn.utils.clip_grad_norm_(theirs, clip_norm)
    adamw(theirs).step()
    torch.testing.assert_close(norm, expected)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
        torch.testing.assert_close(mine, other)
    assert global_grad_norm(ours).item() <= clip_norm * (1 + 1e-6)


def test_zero_turns_clipping_off():
    parameters, untouched = random_parameters(100.0), random_parameters(100.0)
    adamw(parameters).step_clipped(global_grad_norm(parameters), 0.0)
    adamw(untouched).step()
    for mine, other in zip(parameters, untouched, strict=True):
        assert torch.equal(mine.grad, other.grad)  # pyright: ignore[reportArgumentType]
        assert torch.equal(mine, other)


def test_one_steps_clipping_does_not_reach_the_next():
    parameters = random_parameters(100.0)
    optimizer = adamw(parameters)
    optimizer.step_clipped(global_grad_norm(parameters), 0.5)
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    optimizer.step()
    for parameter, gradient in zip(parameters, before, strict=True):
        assert torch.equal(parameter.grad, gradient)  # pyright: ignore[reportArgumentType]


def test_a_missing_gradient_counts_as_zero():
    parameters = random_parameters()
    expected = math.sqrt(sum(p.grad.square().sum().item() for p in parameters[1:] if p.grad is not None))
    parameters[0].grad = None
    norm = global_grad_norm(parameters)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    adamw(parameters).step_clipped(norm, 0.1)
    assert parameters[0].grad is None
    assert global_grad_norm(parameters).item() == pytest.approx(0.1, rel=1e-5)


def test_no_gradient_at_all_is_a_norm_of_zero():
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    norm = global_grad_norm(parameters)
    assert norm.item() == 0
    adamw(parameters).step_clipped(norm, 1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_shows_in_the_norm(bad: float):
    parameters = random_parameters()
    parameters[1].grad[3] = bad  # pyright: ignore[reportOptionalSubscript]
    assert not global_grad_norm(parameters).isfinite()


def test_bfloat16_gradients_are_summed_in_float32():
    parameter = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    norm = global_grad_norm([parameter])
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(100_000), rel=1e-6)
