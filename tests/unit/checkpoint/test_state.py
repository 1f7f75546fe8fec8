import json
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from moe_framework.checkpoint.state import (
    allocate_optimizer_state,
    model_tensors,
    optimizer_step,
    optimizer_tensors,
    rng_state,
    set_optimizer_step,
    set_rng_state,
)
from moe_framework.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias", torch.ones(4))
        self.register_buffer("cache", torch.ones(9), persistent=False)

    def forward(self, tokens):
        return self.head(self.embed(tokens)) + self.bias


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        network(torch.randn(4, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_tensors_share_memory_with_model():
    network = model()
    tensors = model_tensors(network)
    assert list(tensors) == ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]
    tensors["model.0.weight"].zero_()
    assert torch.equal(next(network.parameters()), torch.zeros(5, 3))


def test_tied_weight_appears_once_and_persistent_buffers_only():
    assert sorted(model_tensors(Tied())) == ["model.bias", "model.embed.weight"]


def test_wrapped_model_has_the_names_of_the_plain_one():
    network = model()
    wrapped = nn.Sequential(*(checkpoint_wrapper(layer) for layer in network))
    wrapped[1].compile()
    compiled = torch.compile(wrapped)
    assert isinstance(compiled, nn.Module)
    assert list(model_tensors(compiled)) == list(model_tensors(network))
    optimizer = torch.optim.AdamW(compiled.parameters())
    assert "optimizer.exp_avg_sq.1.bias" in optimizer_tensors(compiled, optimizer)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}, {"foreach": True}, {"capturable": False}])
def test_allocated_state_is_what_the_first_step_makes(options):
    network = model()
    stepped, allocated = (torch.optim.AdamW(network.parameters(), lr=0.0, **options) for _ in range(2))
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stepped.step()
    allocate_optimizer_state(allocated)
    set_optimizer_step(allocated, 1)
    for parameter in network.parameters():
        assert allocated.state[parameter].keys() == stepped.state[parameter].keys()
        for key, value in stepped.state[parameter].items():
            other = allocated.state[parameter][key]
            assert torch.equal(other, value)
            assert (other.dtype, other.device, other.stride()) == (value.dtype, value.device, value.stride())


def test_restored_optimizer_continues_bit_for_bit():
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    train(network, optimizer, 3)
    saved = {
        name: tensor.clone()
        for name, tensor in {**model_tensors(network), **optimizer_tensors(network, optimizer)}.items()
    }
    step = optimizer_step(optimizer)
    train(network, optimizer, 5)

    resumed = model()
    fresh = torch.optim.AdamW(resumed.parameters(), lr=0.1)
    allocate_optimizer_state(fresh)
    targets = {**model_tensors(resumed), **optimizer_tensors(resumed, fresh)}
    assert targets.keys() == saved.keys()
    for name, tensor in targets.items():
        tensor.copy_(saved[name])
    set_optimizer_step(fresh, step)
    train(resumed, fresh, 5)
    assert step == 3
    assert optimizer_step(fresh) == 8
    for name, tensor in model_tensors(network).items():
        assert torch.equal(model_tensors(resumed)[name], tensor)


def test_frozen_parameters_have_no_moments():
    network = model()
    next(network.parameters()).requires_grad_(False)
    optimizer = torch.optim.AdamW(network.parameters())
    assert "optimizer.exp_avg.0.weight" not in optimizer_tensors(network, optimizer)
    assert "optimizer.exp_avg.0.bias" in optimizer_tensors(network, optimizer)


def test_allocation_keeps_existing_state():
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    train(network, optimizer, 2)
    moment = optimizer.state[next(network.parameters())]["exp_avg"].clone()
    allocate_optimizer_state(optimizer)
    assert torch.equal(optimizer.state[next(network.parameters())]["exp_avg"], moment)


def test_unequal_step_counts_are_refused():
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    assert optimizer_step(optimizer) == 0
    train(network, optimizer, 2)
    optimizer.state[next(network.parameters())]["step"].fill_(1)
    with pytest.raises(CheckpointError, match=r"optimizer steps \[1, 2\] differ"):
        optimizer_step(optimizer)


def draw() -> tuple:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_random_numbers_repeat_after_restoring_through_json():
    draw()  # leaves a cached second Gaussian in Python's and numpy's generators
    state = json.loads(json.dumps(rng_state()))
    first = [draw() for _ in range(3)]
    set_rng_state(state)
    assert [draw() for _ in range(3)] == first


@pytest.mark.parametrize("change", [{"torch_cpu": "!"}, {"torch_cpu": "AAAA"}, {"numpy": {}}, {"python": 3}])
def test_malformed_random_state_is_a_clear_error(change):
    with pytest.raises(CheckpointError, match="not a state of random number generators"):
        set_rng_state({**rng_state(), **change})
