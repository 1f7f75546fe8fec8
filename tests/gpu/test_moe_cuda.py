"""The MoE layer's pieces on a GPU: against the reference, and without hidden syncs."""

import pytest
import torch

from moe_framework.moe.balancing import Balancing
from moe_framework.moe.dispatch.local import LocalDispatcher
from moe_framework.moe.experts.grouped_mm import grouped_mm_experts
from moe_framework.moe.experts.layer import GroupedExperts
from moe_framework.moe.experts.loop import loop_experts
from moe_framework.moe.layer import MoELayer, TokenLayout
from moe_framework.moe.router import TopKRouter

pytestmark = pytest.mark.gpu

D, F, E, K = 128, 256, 8, 2


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def _experts_with_gradients(backend, tensors, counts, cotangent):
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = backend(*leaves, counts)
    out.backward(cotangent.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("counts", [[5, 0, 300, 1, 0, 64, 17, 125], [0] * 7 + [512], [0] * 8])
def test_grouped_mm_in_bf16_is_as_close_to_fp32_as_the_loop_is(counts):
    generator = torch.Generator("cuda").manual_seed(sum(counts))
    rows = sum(counts)
    shapes = ((E, 2 * F, D), (E, D, F), (rows, D))
    weights = [torch.randn(shape, device="cuda", generator=generator) * 0.1 for shape in shapes]
    probs = torch.rand(rows, device="cuda", generator=generator)
    cotangent = torch.randn(rows, D, device="cuda", generator=generator)
    tokens_per_expert = torch.tensor(counts, device="cuda")
    exact = _experts_with_gradients(loop_experts, [*weights, probs], tokens_per_expert, cotangent)
    in_bf16 = [*(w.bfloat16() for w in weights), probs]
    ours = _experts_with_gradients(grouped_mm_experts, in_bf16, tokens_per_expert, cotangent)
    loop = _experts_with_gradients(loop_experts, in_bf16, tokens_per_expert, cotangent)
    for name, value, looped, reference in zip(
        ("out", "gate_up", "down", "rows", "probs"), ours, loop, exact, strict=True
    ):
        if reference.numel() == 0 or not reference.any():
            assert not value.any(), name
            continue
        # Both round to bf16 at the same places, so neither may be clearly further from fp32 than the other.
        assert _relative(value, reference) < 1.5 * _relative(looped, reference), name
    for expert, count in enumerate(counts):
        if count == 0:
            assert not ours[1][expert].any()
            assert not ours[2][expert].any()


def test_local_layer_never_waits_for_the_gpu():
    torch.manual_seed(0)
    layer = MoELayer(
        router=TopKRouter(hidden_size=D, num_experts=E, top_k=K),
        dispatcher=LocalDispatcher(num_experts=E),
        experts=GroupedExperts(num_experts=E, hidden_size=D, intermediate_size=F, backend=grouped_mm_experts),
        balancing=Balancing("sequence"),
    ).to("cuda", torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    x = torch.randn(2, 64, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    valid = torch.arange(100, device="cuda")
    layout = TokenLayout.of(torch.Size((2, 64)), valid, x.device)
    cotangent = torch.randn_like(x)
    layer(x, layout)[0].backward(cotangent)  # the first call loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, stats = layer(x, layout)
        (y * cotangent).sum().add(stats.aux_loss).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert y.isfinite().all()
    assert stats.tokens_per_expert_E.sum().item() == 100 * K
