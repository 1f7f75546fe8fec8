"""Weights are moved by exactly one unit in the last place."""

import torch
from torch import nn

from tests.unit.model.builders import plain_decoder
from tools.parity.rounding import round_weights


def steps_of(model: nn.Module, before: list[torch.Tensor]) -> torch.Tensor:
    """How many numbers of fp32 lie between the weights before and after, signed by the number's bits."""
    pairs = zip(model.parameters(), before, strict=True)
    return torch.cat([(p.detach().view(torch.int32) - old.view(torch.int32)).flatten() for p, old in pairs])


def moved(seed: int) -> torch.Tensor:
    model = plain_decoder()
    before = [p.detach().clone() for p in model.parameters()]
    round_weights(model, seed)
    return steps_of(model, before)


def test_every_weight_moves_to_a_neighbouring_number_and_half_of_them_either_way():
    steps = moved(0)
    assert steps.abs().unique().tolist() == [1]
    assert 0.45 < (steps > 0).float().mean() < 0.55


def test_a_seed_gives_its_own_directions_again():
    assert torch.equal(moved(1), moved(1))
    assert 0.45 < (moved(1) == moved(2)).float().mean() < 0.55


def test_weights_stay_trainable_and_keep_no_history():
    model = plain_decoder()
    round_weights(model, 0)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
