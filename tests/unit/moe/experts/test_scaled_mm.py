import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moe_framework.moe.experts import scaled_mm
from moe_framework.moe.experts.fp8_rows import GRADIENTS, VALUES
from moe_framework.moe.experts.loop import loop_experts
from moe_framework.moe.experts.scaled_mm import scaled_mm_experts, scaled_products
from moe_framework.parallel.activation_checkpointing import KEPT, _policy  # pyright: ignore[reportPrivateUsage]
from tests.unit.model.builders import relative_difference

D, F = 48, 32
COUNTS = [[5, 3, 80, 1], [0, 7, 0, 2], [0, 0, 0, 60], [0, 0, 0, 0]]
QUANTITIES = ("out", "gate_up", "down", "rows", "probs")
# Root mean square of a relative rounding to 3 and to 2 bits, at its largest within a binade.
E4M3, E5M2 = (2.0 ** -(bits + 1) / math.sqrt(3) for bits in (3, 2))


def _bound(values: int, gradients: int = 0) -> float:
    return math.sqrt(values * E4M3**2 + gradients * E5M2**2)


# Gate and up have two rounded factors each; then the hidden values and the next weight are rounded, backward the
# gradients of the result and of gate and up.
BOUNDS = dict(zip(QUANTITIES, (_bound(6), _bound(6, 2), _bound(5, 1), _bound(6, 2), _bound(5, 1)), strict=True))


def _inputs(counts: list[int], weight_dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(counts))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    experts, rows = len(counts), sum(counts)
    gate_up, down = random(experts, 2 * F, D) / D**0.5, random(experts, D, F) / F**0.5
    probs = torch.rand(rows, generator=generator)
    return [gate_up.to(weight_dtype), down.to(weight_dtype), random(rows, D).bfloat16(), probs]


def _run(backend: Any, inputs: list[Tensor], counts: list[int]) -> dict[str, Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = backend(*leaves, torch.tensor(counts))
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return dict(zip(QUANTITIES, (out.detach(), *torch.autograd.grad(out, leaves, cotangent)), strict=True))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_experts_equal_the_loop_in_fp32_within_fp8s_rounding(counts: list[int], weight_dtype: torch.dtype):
    inputs = _inputs(counts, weight_dtype)
    ours = _run(scaled_mm_experts, inputs, counts)
    exact = _run(loop_experts, [tensor.float() for tensor in inputs], counts)
    for name, dtype in zip(QUANTITIES, (torch.bfloat16, *(tensor.dtype for tensor in inputs)), strict=True):
        assert ours[name].dtype == dtype
        assert relative_difference(ours[name].float(), exact[name]) < BOUNDS[name], name
    for expert, count in enumerate(counts):
        assert count or not (ours["gate_up"][expert].any() or ours["down"][expert].any())


def test_products_of_numbers_that_fp8_has_are_exact():
    generator = torch.Generator().manual_seed(0)
    rows, weights = (torch.randint(-4, 5, shape, generator=generator).float() for shape in ((9, 16), (2, 32, 16)))
    factors = torch.tensor([[0.5, 9, 9, 9], [2.0, 9, 9, 9]])
    out = scaled_products(rows.to(VALUES), factors, weights.to(VALUES), factors * 4, [4, 5], torch.float32, True)
    expected = torch.cat((rows[:4] @ weights[0].t() * (0.5 * 2.0), rows[4:] @ weights[1].t() * (2.0 * 8.0)))
    assert torch.equal(out, expected)


def test_evaluation_gives_the_same_result_and_writes_nothing_transposed(monkeypatch: pytest.MonkeyPatch):
    inputs = _inputs(COUNTS[0], torch.float32)
    trained = _run(scaled_mm_experts, inputs, COUNTS[0])["out"]
    asked = []
    for name in ("cast_rows", "cast_swiglu"):
        real = getattr(scaled_mm, name)
        spy = partial(lambda real, *a, transposed=True, **k: (asked.append(transposed), real(*a, **k))[1], real)
        monkeypatch.setattr(scaled_mm, name, spy)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    with torch.no_grad():
        out = scaled_mm_experts(*leaves, torch.tensor(COUNTS[0]))  # pyright: ignore[reportCallIssue]
    assert torch.equal(out, trained)
    assert asked == [False] * 4


def test_gradients_have_the_wider_format_and_backward_sums_precisely(monkeypatch: pytest.MonkeyPatch):
    kinds, sums = [], []
    real_cast, real_product = scaled_mm.cast_rows, scaled_mm._product
    monkeypatch.setattr(
        scaled_mm, "cast_rows", lambda x, c, kind, **k: (kinds.append(kind), real_cast(x, c, kind, **k))[1]
    )
    monkeypatch.setattr(
        scaled_mm,
        "_product",
        lambda a, b, f, out, fast: (sums.append((a.dtype, fast)), real_product(a, b, f, out, fast)),
    )
    _run(scaled_mm_experts, _inputs([40], torch.float32), [40])
    assert kinds == [VALUES, VALUES, VALUES, GRADIENTS]
    assert sums == [(VALUES, True)] * 2 + [(GRADIENTS, False)] * 4


def test_an_experts_scale_is_its_own():
    inputs = _inputs(COUNTS[0], torch.float32)
    out = _run(scaled_mm_experts, inputs, COUNTS[0])["out"]
    inputs[0][2] *= 1e4
    assert torch.equal(_run(scaled_mm_experts, inputs, COUNTS[0])["out"][:8], out[:8])


@pytest.mark.parametrize("mode", sorted(KEPT))
def test_recomputation_changes_nothing_and_selective_keeps_the_products(mode: str, monkeypatch: pytest.MonkeyPatch):
    inputs = _inputs(COUNTS[0], torch.float32)
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, KEPT[mode]))
    products = []
    real = scaled_mm._product
    monkeypatch.setattr(scaled_mm, "_product", lambda *a, **k: (products.append(1), real(*a, **k)))

    def recomputed(*arguments: Tensor) -> Any:
        return checkpoint(scaled_mm_experts, *arguments, use_reentrant=False, context_fn=contexts)

    plain = _run(scaled_mm_experts, inputs, COUNTS[0])
    num_plain = len(products)
    again = _run(recomputed, inputs, COUNTS[0])
    for name in QUANTITIES:
        assert torch.equal(plain[name], again[name]), name
    # Six products an expert, of which two are forward's.
    assert num_plain == 6 * len(COUNTS[0])
    assert len(products) - num_plain == (6 if mode == "selective" else 8) * len(COUNTS[0])
