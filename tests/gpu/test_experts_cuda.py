"""Every expert backend and precision on a GPU, against the loop in float32."""

import math
from typing import Any

import pytest
import torch

from moe_framework.moe.experts.base import scaled_swiglu
from moe_framework.moe.experts.choose import ExpertShape, make_backend
from moe_framework.moe.experts.fused_mxfp8 import FUSED, PLAIN, fused_mxfp8_obstacles, fusion_setting
from moe_framework.moe.experts.loop import loop_experts
from moe_framework.moe.experts.te import TransformerEngineExperts
from moe_framework.precision.modes import MODES, available_modes
from moe_framework.precision.policy import precision_policy
from moe_framework.precision.recipes import RECIPES

pytestmark = pytest.mark.gpu

E, D, F = 8, 512, 768
COUNTS = [100, 0, 333, 1, 64, 77, 0, 449]

# Root mean square of the relative rounding error, taken at its largest within a binade: half a unit in the last
# place is 2^-(mantissa bits + 1), uniformly distributed.
BF16, E4M3, E5M2 = (2.0 ** -(bits + 1) / math.sqrt(3) for bits in (7, 3, 2))


def _bound(*roundings: float) -> float:
    """Independent roundings of the factors of a product add up in squares."""
    return math.sqrt(sum(rounding**2 for rounding in roundings))


def _bounds(mode: str) -> dict[str, float]:
    if mode == "bf16":
        # Inputs, weights and every intermediate result are rounded, up to ten of them along the way back.
        return dict.fromkeys(("out", "gate_up", "down", "rows", "probs"), _bound(*[BF16] * 10))
    gradient = E4M3 if mode in ("fp8_block", "mxfp8") else E5M2
    forward = _bound(*[E4M3] * 4)
    return {
        "out": forward,
        "gate_up": _bound(*[E4M3] * 4, gradient, gradient),
        "down": _bound(*[E4M3] * 3, gradient),
        "rows": _bound(*[E4M3] * 4, gradient, gradient),
        "probs": _bound(*[E4M3] * 4, gradient),
    }


def _case(seed: int):
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = sum(COUNTS)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    tensors = [random(E, 2 * F, D) * 0.05, random(E, D, F) * 0.05, random(rows, D)]
    probs = torch.rand(rows, device="cuda", generator=generator)
    return [*tensors, probs], torch.tensor(COUNTS, device="cuda"), random(rows, D)


def _run(backend, tensors, counts, cotangent) -> dict[str, Any]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = backend(*leaves, counts)
    out.backward(cotangent.to(out.dtype))
    return dict(
        zip(("out", "gate_up", "down", "rows", "probs"), [out.detach(), *(t.grad for t in leaves)], strict=True)
    )


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def _in_bf16(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*(tensor.bfloat16() for tensor in tensors[:3]), tensors[3]]


CASES = [("grouped_mm", "bf16"), ("sequential", "bf16"), ("scaled_mm", "fp8_current")]
CASES += [("te", mode) for mode in MODES if mode not in ("fp32", "mxfp8_emulated")]


@pytest.mark.parametrize(("name", "mode"), [*CASES, ("mxfp8_emulated", "mxfp8_emulated")])
def test_backend_equals_the_loop_in_fp32_within_the_rounding_of_its_format(name, mode):
    if mode not in available_modes(torch.cuda.get_device_capability()):
        pytest.skip(f"this GPU has no {mode}")
    policy = precision_policy(mode, torch.device("cuda"))
    backend = make_backend(name, ExpertShape(E, D, F, sum(COUNTS)), policy)
    for seed in (1, 2):  # the second call finds the state of the first
        tensors, counts, cotangent = _case(seed)
        exact = _run(loop_experts, tensors, counts, cotangent)
        ours = _run(backend, _in_bf16(tensors), counts, cotangent)
        for quantity, bound in _bounds("mxfp8" if mode == "mxfp8_emulated" else mode).items():
            assert _relative(ours[quantity], exact[quantity]) < bound, (quantity, seed)
        for expert, count in enumerate(COUNTS):
            if count == 0:
                assert not ours["gate_up"][expert].any()
                assert not ours["down"][expert].any()


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_rank_without_tokens_gets_zero_gradients(name, mode):
    if mode not in available_modes(torch.cuda.get_device_capability()):
        pytest.skip(f"this GPU has no {mode}")
    backend = make_backend(name, ExpertShape(E, D, F, 0), precision_policy(mode, torch.device("cuda")))
    tensors, counts, cotangent = _case(3)
    tensors = _in_bf16(tensors)
    ours = _run(backend, [*tensors[:2], tensors[2][:0], tensors[3][:0]], torch.zeros_like(counts), cotangent[:0])
    assert ours["out"].shape == (0, D)
    assert not ours["gate_up"].any()
    assert not ours["down"].any()


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_scaled_mm_of_one_expert_takes_a_gradient_that_is_one_row_repeated(weights: torch.dtype):
    generator = torch.Generator("cuda").manual_seed(7)
    shapes = ((1, 2 * F, D), (1, D, F), (300, D))
    gate_up, down, rows = (0.1 * torch.randn(shape, device="cuda", generator=generator) for shape in shapes)
    probs, counts = torch.rand(300, device="cuda", generator=generator), torch.tensor([300], device="cuda")
    cotangent = torch.randn(1, D, device="cuda", generator=generator).expand(300, D)
    exact = _run(loop_experts, [gate_up, down, rows, probs], counts, cotangent)
    backend = make_backend(
        "scaled_mm", ExpertShape(1, D, F, 300), precision_policy("fp8_current", torch.device("cuda"))
    )
    inputs = [gate_up.to(weights), down.to(weights), rows.bfloat16(), probs]
    ours = _run(backend, inputs, counts, cotangent.bfloat16())
    for quantity, bound in _bounds("fp8_current").items():
        assert _relative(ours[quantity], exact[quantity]) < bound, quantity


def test_te_gradients_reach_the_stacked_weight_without_a_copy():
    backend = make_backend("te", ExpertShape(E, D, F, 0), precision_policy("bf16", torch.device("cuda")))
    tensors, counts, cotangent = _case(4)
    leaves = [tensor.requires_grad_() for tensor in _in_bf16(tensors)]
    out = backend(leaves[0], leaves[1], leaves[2], leaves[3], counts)
    before = torch.cuda.memory_allocated()
    gate_up_grad, down_grad = torch.autograd.grad(out, leaves[:2], cotangent.bfloat16())
    kept = gate_up_grad.untyped_storage().nbytes() + down_grad.untyped_storage().nbytes()
    assert kept == 2 * (leaves[0].numel() + leaves[1].numel())
    assert torch.cuda.memory_allocated() - before <= kept


def _te(recipe: str | None, arrangement=None) -> TransformerEngineExperts:
    return TransformerEngineExperts(
        num_local_experts=E,
        hidden_size=D,
        intermediate_size=F,
        recipe=None if recipe is None else RECIPES[recipe],
        arrangement=arrangement,
    )


@pytest.mark.parametrize("recipe", [None, "fp8_current"])
def test_the_fused_operations_arrangement_changes_no_result(recipe: str | None):
    # Interleaving reorders output channels and padding adds zeros, so that products, and the scales of whole tensors,
    # stay the same; a kernel for other row counts may sum in another order, which moves a few results by one rounding.
    tensors, counts, cotangent = _case(5)
    backends = _te(recipe, PLAIN), _te(recipe, FUSED)
    for _ in range(2):  # the second call finds the weights of the first released
        plain, arranged = (_run(backend, _in_bf16(tensors), counts, cotangent) for backend in backends)
        for quantity, value in arranged.items():
            assert _relative(value, plain[quantity]) < (BF16 if recipe is None else E4M3), quantity


def test_mxfp8_is_fused_where_no_obstacle_is_found():
    capability = torch.cuda.get_device_capability()
    obstacles = fused_mxfp8_obstacles(hidden_size=D, intermediate_size=F, setting=fusion_setting(capability))
    if capability < (10, 0):
        assert any("compute capability 10.0" in obstacle for obstacle in obstacles)
        pytest.skip(f"the fused operation cannot run: {'; '.join(obstacles)}")
    backend = _te("mxfp8")
    tensors, counts, cotangent = _case(6)
    _run(backend, _in_bf16(tensors), counts, cotangent)
    assert backend.is_fused() is not bool(obstacles)


@pytest.mark.parametrize("width", [8, 768, 5000])
def test_fused_swiglu_rounds_once(width):
    from moe_framework.moe.kernels.swiglu import fused_scaled_swiglu

    generator = torch.Generator("cuda").manual_seed(width)
    gate_up = torch.randn(37, 2 * width, device="cuda", generator=generator).mul_(3).bfloat16()
    probs = torch.rand(37, device="cuda", generator=generator)
    cotangent = torch.randn(37, width, device="cuda", generator=generator).bfloat16()
    a = [gate_up.clone().requires_grad_(), probs.clone().requires_grad_()]
    b = [gate_up.double().requires_grad_(), probs.double().requires_grad_()]
    ours = fused_scaled_swiglu(*a)
    exact = scaled_swiglu(*b)
    ours.backward(cotangent)
    exact.backward(cotangent.double())
    unit = 2.0**-8
    for value, reference in ((ours, exact), (a[0].grad, b[0].grad)):
        assert value is not None
        assert reference is not None
        assert ((value.double() - reference).abs() <= unit * reference.abs() + 1e-30).double().mean() > 0.999
        assert _relative(value, reference) < BF16
    assert a[1].grad is not None
    assert b[1].grad is not None
    assert _relative(a[1].grad, b[1].grad) < 1e-5
