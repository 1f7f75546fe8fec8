import math

import pytest
import torch

from moe_framework.observe.router_health import (
    RouterHealthWindow,
    max_over_mean_load,
    router_health,
    router_scalars,
)


def test_health_of_a_layer_follows_its_definition():
    balanced, skewed = router_health(torch.tensor([[5, 5, 5, 5], [12, 8, 0, 0]]), torch.tensor([13.0, 5.0]), 10)
    assert balanced.load == [0.25] * 4
    assert balanced.max_over_mean == 1.0
    assert balanced.entropy == pytest.approx(1.3)
    assert balanced.never_used == []
    assert skewed.load == [0.6, 0.4, 0.0, 0.0]
    assert skewed.max_over_mean == pytest.approx(12 / 5)
    assert skewed.entropy == pytest.approx(0.5)
    assert skewed.never_used == [2, 3]


def test_counts_beyond_fp32_stay_exact():
    (layer,) = router_health(torch.tensor([[2**25 + 1, 2**25 - 1]]), torch.tensor([0.0]), 2**25)
    assert layer.load[0] == (2**25 + 1) / 2**26


def test_a_layer_without_tokens_has_no_number_and_uses_no_expert():
    (layer,) = router_health(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1), 0)
    assert all(math.isnan(share) for share in layer.load)
    assert math.isnan(layer.max_over_mean)
    assert math.isnan(layer.entropy)
    assert layer.never_used == [0, 1]


def test_curves_are_named_by_layer():
    layers = router_health(torch.tensor([[4, 0], [2, 2]]), torch.tensor([1.0, 2.0]), 4)
    assert router_scalars(layers) == {
        "router/layer_00/max_over_mean": 2.0,
        "router/layer_00/entropy": 0.25,
        "router/layer_00/num_never_used": 1.0,
        "router/layer_01/max_over_mean": 1.0,
        "router/layer_01/entropy": 0.5,
        "router/layer_01/num_never_used": 0.0,
    }


def test_the_worst_layer_stands_for_the_model():
    layers = router_health(torch.tensor([[0, 0], [3, 1], [2, 2]]), torch.zeros(3), 4)
    assert max_over_mean_load(layers) == 1.5
    assert math.isnan(max_over_mean_load(layers[:1]))


def test_an_expert_used_once_in_the_window_is_not_never_used():
    window = RouterHealthWindow()
    window.add(torch.tensor([[4, 0, 0]]), torch.tensor([2.0]), 4)
    window.add(torch.tensor([[3, 1, 0]]), torch.tensor([4.0]), 4)
    (layer,) = window.take()
    assert layer.never_used == [2]
    assert layer.load == [7 / 8, 1 / 8, 0.0]
    assert layer.entropy == pytest.approx(0.75)


def test_taking_begins_a_new_window_and_leaves_the_arguments_alone():
    window = RouterHealthWindow()
    counts = torch.tensor([[4, 0]])
    window.add(counts, torch.tensor([0.0]), 4)
    window.take()
    assert window.take() == []
    window.add(torch.tensor([[0, 4]]), torch.tensor([0.0]), 4)
    assert window.take()[0].never_used == [0]
    assert counts.tolist() == [[4, 0]]
