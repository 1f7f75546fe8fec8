"""What surrounds Transformer Engine's products, with products of torch in their place; tests/gpu has the real ones."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from moe_framework.moe.experts import te
from moe_framework.moe.experts.loop import loop_experts
from moe_framework.moe.experts.te import TransformerEngineExperts
from moe_framework.parallel.activation_checkpointing import apply_activation_checkpointing
from moe_framework.precision.recipes import TeRecipe
from moe_framework.train.step import Objective, StepCounts, accumulate_gradients
from tests.unit.model.builders import plain_decoder, random_batch

E, D, F = 4, 6, 10
COUNTS = torch.tensor([3, 0, 18, 1])


class _Operation(nn.Module):
    """Has one parameter per expert, like a grouped linear of Transformer Engine."""

    def __init__(self, num_experts: int):
        super().__init__()
        for expert in range(num_experts):
            self.register_parameter(f"weight{expert}", nn.Parameter(torch.empty(0)))


class _Stub(TransformerEngineExperts):
    def __init__(self, num_experts: int, recipe: TeRecipe | None = None):
        self._recipe = recipe
        self._fc1, self._fc2 = _Operation(num_experts), _Operation(num_experts)
        self.row_counts: list[list[int]] = []

        def mlp(rows: Tensor, counts: Tensor, probs: Tensor) -> Tensor:
            self.row_counts.append(counts.tolist())
            gate_up, down = (torch.stack(list(op.parameters())) for op in (self._fc1, self._fc2))
            return loop_experts(gate_up, down, rows, probs, counts)

        self._mlp = mlp

    def _autocast(self):
        return torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad()


def _case(rows: int) -> list[Tensor]:
    return [torch.randn(E, 2 * F, D), torch.randn(E, D, F), torch.randn(rows, D), torch.rand(rows)]


def _run(backend, tensors: list[Tensor], counts: Tensor, cotangent: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = backend(*leaves, counts)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


@pytest.mark.parametrize("recipe", [None, TeRecipe(16, 16, lambda: None)], ids=["exact", "padded"])
def test_stacked_weights_get_the_gradients_of_the_loop(recipe: TeRecipe | None):
    tensors, cotangent = _case(22), torch.randn(22, D)
    stub = _Stub(E, recipe)
    ours = _run(stub, tensors, COUNTS, cotangent)
    theirs = _run(loop_experts, tensors, COUNTS, cotangent)
    for value, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-6)
    assert not ours[1][1].any()
    assert stub.row_counts == [[3, 0, 18, 1] if recipe is None else [16, 0, 32, 16]]


def test_without_tokens_nothing_is_multiplied_and_gradients_are_zero():
    stub = _Stub(E)
    out, gate_up, down, _, _ = _run(stub, _case(0), torch.zeros_like(COUNTS), torch.randn(0, D))
    assert out.shape == (0, D)
    assert not gate_up.any()
    assert not down.any()
    assert stub.row_counts == []


def test_evaluation_builds_no_graph():
    with torch.no_grad():
        gate_up, down, rows, probs = _case(22)
        assert not _Stub(E)(gate_up, down, rows, probs, COUNTS).requires_grad


def test_slices_of_one_buffer_are_stacked_without_a_copy():
    buffer = torch.randn(E, 2, 3)
    stacked = te._stacked([buffer[expert] for expert in range(E)])
    assert stacked.data_ptr() == buffer.data_ptr()
    assert torch.equal(stacked, buffer)
    apart = [buffer[1], buffer[0]]
    assert torch.equal(te._stacked(apart), torch.stack(apart))


def test_backward_lets_go_of_the_activations_while_the_output_lives():
    gate_up, down, rows, probs = (tensor.requires_grad_() for tensor in _case(22))
    out = _Stub(E)(gate_up, down, rows, probs, COUNTS)
    inner = weakref.ref(out.grad_fn.leaves[0])  # pyright: ignore
    out.backward(torch.randn_like(out))
    gc.collect()
    assert inner() is None


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_changes_no_bit(mode: str):
    batch = random_batch(0, [[24], [10, 7], [13]], seq_length=24)
    gradients = []
    for activation_checkpointing in ("none", mode):
        model = plain_decoder()
        for block in model.layers:
            block.moe.experts.backend = _Stub(block.moe.router.weight.shape[0])  # pyright: ignore
        apply_activation_checkpointing(model, activation_checkpointing)
        counts = StepCounts(batch.num_targets, batch.num_tokens)
        accumulate_gradients(model, [batch, batch], counts, Objective(0.01, 0.001))
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
