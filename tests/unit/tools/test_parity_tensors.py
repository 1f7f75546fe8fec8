"""Comparison of named tensors."""

import math

import pytest
import torch

from tools.parity.tensors import compare, replica_digests, swapped, together, unequal_replicas, whole


def test_equal_tensors_do_not_differ():
    x = torch.randn(3, 5)
    found = compare(x, x.clone())
    assert (found.relative, found.factor, found.scaled) == (0.0, pytest.approx(1.0), pytest.approx(0.0, abs=1e-12))
    assert found.rms == pytest.approx(x.square().mean().sqrt().item())


def test_a_multiple_is_known_by_its_factor():
    x = torch.randn(40)
    found = compare(2 * x, x)
    assert found.relative == pytest.approx(1.0)
    assert found.factor == pytest.approx(2.0)
    assert found.scaled < 1e-7


@pytest.mark.parametrize("other", [torch.ones(4), torch.tensor([1.0, math.nan, 1.0]), torch.tensor([math.inf] * 3)])
def test_another_shape_and_numbers_that_are_not_finite_differ_infinitely(other: torch.Tensor):
    assert compare(other, torch.ones(3)).relative == math.inf


def test_zero_is_compared_absolutely():
    assert compare(torch.zeros(3), torch.zeros(3)).relative == 0.0
    assert compare(torch.tensor([3.0, 4.0]), torch.zeros(2)).relative == pytest.approx(5.0)


def test_experts_whose_width_is_shared_get_the_shape_of_the_unsharded_model():
    gate_up = torch.randn(4, 6, 5)
    assert torch.equal(whole(gate_up.unflatten(1, (2, 3))), gate_up)
    assert torch.equal(swapped(gate_up), torch.cat((gate_up[:, 3:], gate_up[:, :3]), dim=1))


def test_copies_are_compared_bit_by_bit_and_parts_are_not_copies():
    x = torch.randn(6)
    drifted = x.clone()
    drifted[3] = torch.nextafter(drifted[3], torch.tensor(math.inf))
    first, same, other = (replica_digests(iter([("w", value)])) for value in (x, x.clone(), drifted))
    assert unequal_replicas([first, same]) == ([], 1)
    assert unequal_replicas([first, same, other]) == (["w"], 2)
    digest = next(iter(first.values()))
    assert unequal_replicas([{("w", ("a",)): digest}, {("w", ("b",)): "another"}]) == ([], 0)


def test_tensors_together_differ_as_one():
    a, b = torch.randn(40), torch.randn(3)
    other_a, other_b = a + 0.1 * torch.randn(40), b - 1.0
    both = together([compare(other_a, a), compare(other_b, b)])
    assert both == pytest.approx(compare(torch.cat((other_a, other_b)), torch.cat((a, b))).relative, rel=1e-6)
    assert together([compare(torch.zeros(3), torch.zeros(3))]) == 0.0
