import math

import pytest
import torch

from moe_framework.moe.experts.loop import loop_experts

pytest.importorskip("torchao")

from moe_framework.moe.experts.mxfp8_emulated import mxfp8_emulated_experts

E, D, F = 4, 64, 96
COUNTS = [5, 0, 40, 19]


def _run(backend, dtype: torch.dtype, tensors, counts, cotangent):
    leaves = [tensor.clone().to(torch.float32 if index == 3 else dtype) for index, tensor in enumerate(tensors)]
    for leaf in leaves:
        leaf.requires_grad_()
    out = backend(*leaves, counts)
    out.backward(cotangent.to(dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    rows = sum(COUNTS)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = [random(E, 2 * F, D) * 0.1, random(E, D, F) * 0.1, random(rows, D), torch.rand(rows, generator=generator)]
    return tensors, torch.tensor(COUNTS), random(rows, D)


def test_difference_from_fp32_is_that_of_e4m3_and_not_that_of_bf16(case):
    exact = _run(loop_experts, torch.float32, *case)
    in_bf16 = _run(loop_experts, torch.bfloat16, *case)
    emulated = _run(mxfp8_emulated_experts, torch.bfloat16, *case)
    # Six factors are rounded on the longest way (rows, gate_up, hidden, down, and two gradients), each by at most
    # half of 2^-3 relative, uniformly.
    bound = math.sqrt(6) * 2**-4 / math.sqrt(3)
    for name, value, plain, reference in zip(
        ("out", "gate_up", "down", "rows", "probs"), emulated, in_bf16, exact, strict=True
    ):
        distance = ((value.float() - reference).norm() / reference.norm()).item()
        # The norm of n independent errors spreads by 1 / sqrt(2n): three times that, for the few gradients of probs.
        assert distance < bound * (1 + 3 / math.sqrt(2 * value.numel())), name
        # bf16 has four more bits, so emulation that did nothing would be far closer.
        assert distance > 3 * ((plain.float() - reference).norm() / reference.norm()).item(), name


def test_expert_without_tokens_gets_zero_gradients(case):
    _, gate_up, down, _, _ = _run(mxfp8_emulated_experts, torch.bfloat16, *case)
    assert not gate_up[1].any()
    assert not down[1].any()
    assert gate_up[0].any()


def test_rank_without_tokens_gets_zero_gradients(case):
    tensors, counts, cotangent = case
    none = [tensors[0], tensors[1], tensors[2][:0], tensors[3][:0]]
    out, gate_up, down, _, _ = _run(
        mxfp8_emulated_experts, torch.bfloat16, none, torch.zeros_like(counts), cotangent[:0]
    )
    assert out.shape == (0, D)
    assert not gate_up.any()
    assert not down.any()
