from typing import Any

import pytest
import torch

from moe_framework.optim.adamw import AdamW, build_adamw
from moe_framework.optim.clip import global_grad_norm
from tests.unit.model.builders import plain_decoder

SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.7, "eps": 1e-6}


def test_every_parameter_is_in_one_group_and_only_norms_do_not_decay():
    model = plain_decoder()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = build_adamw(model, **SETTINGS).param_groups
    decayed_names = [names.pop(id(parameter)) for parameter in decayed["params"]]
    kept_names = [names.pop(id(parameter)) for parameter in kept["params"]]
    assert not names
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert len(kept_names) == 5
    assert all(name.endswith("norm.weight") for name in kept_names)
    assert not any(name.endswith("norm.weight") for name in decayed_names)
    assert {"embed.weight", "layers.0.moe.experts.gate_up", "layers.1.moe.router.weight"} <= set(decayed_names)


@pytest.mark.parametrize(
    ("compiled", "clip_norm"),
    [
        (False, 0.0),
        (False, 0.5),
        pytest.param(True, 0.0, marks=pytest.mark.slow),
        pytest.param(True, 0.5, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_algorithm_2_of_the_paper(compiled: bool, clip_norm: float):
    model = torch.nn.Linear(3, 2)
    optimizer = build_adamw(model, **SETTINGS, compiled=compiled)
    expected = {
        p: (p.detach().double(), torch.zeros_like(p).double(), torch.zeros_like(p).double())
        for p in (
            model.weight,
            model.bias,
        )
    }
    torch.manual_seed(0)
    for step in (1, 2, 3):
        for parameter in expected:
            parameter.grad = torch.randn(parameter.shape)
        norm = global_grad_norm(expected)
        excess = max(1.0, norm.item() / clip_norm) if clip_norm else 1.0
        for parameter, (value, first, second) in expected.items():
            assert parameter.grad is not None
            gradient = parameter.grad.double() / excess
            first = 0.8 * first + 0.2 * gradient
            second = 0.7 * second + 0.3 * gradient.square()
            decay = 0.3 if parameter.ndim == 2 else 0.0
            update = (first / (1 - 0.8**step)) / ((second / (1 - 0.7**step)).sqrt() + 1e-6)
            expected[parameter] = value - 1e-2 * (decay * value + update), first, second
        optimizer.step_clipped(norm, clip_norm)
    for parameter, (value, _, _) in expected.items():
        torch.testing.assert_close(parameter.double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_update_takes_another_learning_rate_without_compiling_again():
    model = plain_decoder()
    optimizer = build_adamw(model, **SETTINGS, compiled=True)
    norm = torch.ones(())
    graphs = []
    for lr in (1e-2, 2e-2, 3e-3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step_clipped(norm, 1.0)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] == graphs[2]


@pytest.mark.slow
def test_a_compiled_update_takes_a_rank_without_a_part_of_a_tensor():
    # A router of 8 experts over 16 ranks leaves half of them without a row.
    empty, full = torch.nn.Parameter(torch.empty(0, 4)), torch.nn.Parameter(torch.ones(2, 4))
    for parameter in (empty, full):
        parameter.grad = torch.ones_like(parameter)
    optimizer = AdamW([{"params": [empty, full], "weight_decay": 0.0}], lr=0.1, compiled=True)
    optimizer.step_clipped(torch.ones(()), 0.0)
    assert empty.shape == (0, 4)
    torch.testing.assert_close(full.detach(), torch.full((2, 4), 0.9))
