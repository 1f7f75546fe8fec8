"""`loop` against the formula, and every other backend against `loop`."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_framework.moe.experts import sequential
from moe_framework.moe.experts.base import ExpertBackend
from moe_framework.moe.experts.choose import BACKENDS
from moe_framework.moe.experts.grouped_mm import grouped_mm_experts
from moe_framework.moe.experts.loop import loop_experts
from tests.unit.model.builders import relative_difference

D, WIDTH = 24, 16
COUNTS = [[5, 3, 8, 1], [0, 7, 0, 2], [11, 0, 0, 0], [0, 0, 0, 6], [0, 0, 0, 0]]


class Inputs(NamedTuple):
    gate_up: Tensor
    down: Tensor
    rows_RD: Tensor
    probs_R: Tensor

    def leaves(self) -> "Inputs":
        """Copies that collect gradients."""
        return Inputs(*(tensor.clone().requires_grad_() for tensor in self))


def random_inputs(counts: list[int], dtype: torch.dtype) -> Inputs:
    torch.manual_seed(sum(counts))
    num_experts, num_rows = len(counts), sum(counts)
    gate_up = torch.randn(num_experts, 2 * WIDTH, D) / D**0.5
    down = torch.randn(num_experts, D, WIDTH) / WIDTH**0.5
    rows, probs = torch.randn(num_rows, D), torch.rand(num_rows)
    return Inputs(gate_up.to(dtype), down.to(dtype), rows.to(dtype), probs)


def run(backend: ExpertBackend, inputs: Inputs, counts: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the gradients of all four inputs under a random cotangent."""
    leaves = inputs.leaves()
    out = backend(*leaves, torch.tensor(counts))
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    out.backward(cotangent)
    gradients = [leaf.grad for leaf in leaves]
    assert all(gradient is not None for gradient in gradients)
    return out.detach(), [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_loop_is_the_formula_gate_first(counts: list[int]):
    gate_up, down, rows, probs = (tensor.double() for tensor in random_inputs(counts, torch.float32))
    out = loop_experts(gate_up, down, rows, probs, torch.tensor(counts))
    for i, e in enumerate(e for e, count in enumerate(counts) for _ in range(count)):
        gate, up = gate_up[e, :WIDTH] @ rows[i], gate_up[e, WIDTH:] @ rows[i]
        torch.testing.assert_close(out[i], probs[i] * (down[e] @ (F.silu(gate) * up)))


@pytest.mark.parametrize("name", sorted(BACKENDS.keys() - {"loop"}))
@pytest.mark.parametrize("counts", COUNTS, ids=str)
# fp32: sums of at most 24 terms in another order. bf16: each result rounded to 8 bits, after such a sum.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_backend_equals_loop_forward_and_backward(name: str, counts: list[int], dtype: torch.dtype, tolerance: float):
    inputs = random_inputs(counts, dtype)
    out, gradients = run(BACKENDS[name], inputs, counts)
    expected, expected_gradients = run(loop_experts, inputs, counts)
    assert out.dtype == dtype
    assert relative_difference(out, expected) <= tolerance
    for gradient, wanted, leaf in zip(gradients, expected_gradients, inputs, strict=True):
        assert gradient.dtype == leaf.dtype
        assert gradient.shape == leaf.shape
        assert relative_difference(gradient, wanted) <= tolerance


@pytest.mark.parametrize("name", BACKENDS)
def test_float32_weights_are_cast_and_get_float32_gradients(name: str):
    counts = COUNTS[1]
    inputs = random_inputs(counts, torch.float32)
    gate_up, down, rows, probs = inputs
    half = Inputs(gate_up.bfloat16(), down.bfloat16(), rows.bfloat16(), probs)
    out, gradients = run(BACKENDS[name], inputs._replace(rows_RD=half.rows_RD), counts)
    expected, expected_gradients = run(BACKENDS[name], half, counts)
    assert torch.equal(out, expected)
    for gradient, wanted in zip(gradients[:2], expected_gradients[:2], strict=True):
        assert gradient.dtype == torch.float32
        assert relative_difference(gradient, wanted.float()) <= 2**-8


def test_sequential_asks_for_gradients_in_the_weights_dtype(monkeypatch: pytest.MonkeyPatch):
    # On CUDA they are then rounded once, from the float32 sums of the products.
    asked: list[torch.dtype] = []
    real = sequential.weight_gradients

    def recorded(grad: Tensor, x: Tensor, counts: list[int], dtype: torch.dtype) -> Tensor:
        asked.append(dtype)
        return real(grad, x, counts, dtype)

    monkeypatch.setattr(sequential, "weight_gradients", recorded)
    gate_up, down, rows, probs = random_inputs(COUNTS[0], torch.float32)
    run(sequential.sequential_experts, Inputs(gate_up, down, rows.bfloat16(), probs), COUNTS[0])
    run(sequential.sequential_experts, Inputs(gate_up.bfloat16(), down.bfloat16(), rows.bfloat16(), probs), COUNTS[0])
    assert asked == [torch.float32] * 2 + [torch.bfloat16] * 2


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_expert_with_zero_tokens_gets_zero_grad(backend: ExpertBackend, counts: list[int]):
    _, (gate_up, down, _, _) = run(backend, random_inputs(counts, torch.float32), counts)
    for expert, count in enumerate(counts):
        assert (gate_up[expert].count_nonzero() > 0) == (count > 0)
        assert (down[expert].count_nonzero() > 0) == (count > 0)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_a_broadcast_cotangent_is_taken(backend: ExpertBackend):
    counts = [3, 0, 2, 4]
    inputs = random_inputs(counts, torch.float32)
    leaves, others = inputs.leaves(), inputs.leaves()
    backend(*leaves, torch.tensor(counts)).sum().backward()
    out = backend(*others, torch.tensor(counts))
    out.backward(torch.ones_like(out).contiguous())
    for leaf, other in zip(leaves, others, strict=True):
        assert leaf.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(leaf.grad, other.grad)


def test_grouped_mm_runs_without_gradients():
    inputs = random_inputs([2, 1, 0, 3], torch.float32)
    with torch.no_grad():
        out = grouped_mm_experts(*inputs, torch.tensor([2, 1, 0, 3]))
    assert relative_difference(out, loop_experts(*inputs, torch.tensor([2, 1, 0, 3]))) <= 1e-6
