"""What surrounds Transformer Engine's products, with products of torch in their place; tests/gpu has the real ones."""

import gc
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_framework.distributed.runtime import TE_FUSION_FLAG
from moe_framework.moe.experts import fused_mxfp8, te
from moe_framework.moe.experts.fused_mxfp8 import PLAIN, Arrangement, deinterleave_gate_up
from moe_framework.moe.experts.loop import loop_experts
from moe_framework.moe.experts.te import TransformerEngineExperts
from moe_framework.parallel.activation_checkpointing import apply_activation_checkpointing
from moe_framework.precision.recipes import RECIPES, TeRecipe
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


class _IntoMainGrad(torch.autograd.Function):
    """Passes a weight on; writes its gradient into `main_grad`, as Transformer Engine does when asked to fuse it."""

    @staticmethod
    def forward(ctx, weight, dtypes):
        ctx.weight, ctx.dtypes = weight, dtypes
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.weight.main_grad.copy_(grad)
        ctx.dtypes.append(ctx.weight.main_grad.dtype)
        return None, None


class _Stub(TransformerEngineExperts):
    def __init__(self, num_experts: int, recipe: TeRecipe | None = None, arrangement: Arrangement = PLAIN):
        self._recipe, self._arrangement, self._operations = recipe, arrangement, None
        self._fc1, self._fc2 = _Operation(num_experts), _Operation(num_experts)
        self.row_counts: list[list[int]] = []
        self.gradient_dtypes: list[torch.dtype] = []

        def mlp(rows: Tensor, counts: Tensor, probs: Tensor) -> Tensor:
            self.row_counts.append(counts.tolist())
            weights = (
                [_IntoMainGrad.apply(p, self.gradient_dtypes) for p in op.parameters()] for op in (self._fc1, self._fc2)
            )
            gate_up, down = map(torch.stack, weights)
            if arrangement.interleave is not None:
                gate_up = deinterleave_gate_up(gate_up, arrangement.interleave)
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
    # In float64, because padded rows may be summed in another order.
    tensors, cotangent = [tensor.double() for tensor in _case(22)], torch.randn(22, D).double()
    stub = _Stub(E, recipe)
    ours = _run(stub, tensors, COUNTS, cotangent)
    theirs = _run(loop_experts, tensors, COUNTS, cotangent)
    for value, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value, reference)
    assert not ours[1][1].any()
    assert stub.row_counts == [[3, 0, 18, 1] if recipe is None else [16, 0, 32, 16]]


@pytest.mark.parametrize("recipe", [None, TeRecipe(16, 16, lambda: None)], ids=["exact", "quantized"])
def test_interleaved_weights_and_padded_rows_change_no_result(recipe: TeRecipe | None):
    tensors, cotangent = [tensor.double() for tensor in _case(22)], torch.randn(22, D).double()
    stub = _Stub(E, recipe, Arrangement(interleave=5, row_alignment=32))
    ours = _run(stub, tensors, COUNTS, cotangent)
    theirs = _run(loop_experts, tensors, COUNTS, cotangent)
    for value, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value, reference)
    assert stub.row_counts == [[32, 0, 32, 32]]


def test_no_copy_of_quantized_weights_outlives_forward():
    gate_up, down, rows, probs = (tensor.requires_grad_() for tensor in _case(22))
    stub = _Stub(E, TeRecipe(16, 16, lambda: None), Arrangement(interleave=5, row_alignment=32))
    _out = stub(gate_up, down, rows, probs, COUNTS)
    assert [weight.numel() for weights in stub.weights() for weight in weights] == [0] * 2 * E
    with torch.no_grad():
        stub(gate_up, down, rows, probs, COUNTS)
    assert [weight.numel() for weight in stub.weights()[0]] == [0] * E


def test_a_fusion_that_did_not_happen_is_warned_about_once(caplog: pytest.LogCaptureFixture):
    fused_mxfp8.warn_unfused.cache_clear()
    gate_up, down, rows, probs = torch.randn(E, 64, D), torch.randn(E, D, 32), torch.randn(22, D), torch.rand(22)
    stub = _Stub(E, TeRecipe(16, 16, lambda: None, fusible=True), fused_mxfp8.FUSED)
    for _ in range(2):
        stub(gate_up, down, rows, probs, COUNTS)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "did not use its fused operation" in record.message
    assert stub.row_counts[0] == [256, 0, 256, 256]


def _fake_package(folder: Path) -> None:
    """A transformer_engine that notes, while it is imported, whether its fusion was asked for."""
    for name in ("", "pytorch", "pytorch/ops"):
        (folder / "transformer_engine" / name).mkdir(exist_ok=True, parents=True)
        (folder / "transformer_engine" / name / "__init__.py").write_text(
            f"import os\nFLAG = os.environ.get('{TE_FUSION_FLAG}')\n"
        )


def test_the_fusion_is_asked_for_before_the_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    _fake_package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(TE_FUSION_FLAG, "")
    monkeypatch.delenv(TE_FUSION_FLAG)
    names = ["transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops"]
    try:
        package, ops = te.import_te()
        assert (package.FLAG, ops.FLAG) == ("1", "1")
    finally:
        for name in names:
            sys.modules.pop(name, None)


class _FakeOps:
    """Notes how the operations are made, and what they are called with."""

    def __init__(self):
        self.interleave: list[int | None] = []
        self.calls: list[tuple] = []

    def GroupedLinear(self, num_experts, *_sizes, **_options):  # noqa: N802 - Transformer Engine's name
        return _Operation(num_experts)

    def ScaledSwiGLU(self, *, glu_interleave_size):  # noqa: N802 - Transformer Engine's name
        self.interleave.append(glu_interleave_size)

    def Sequential(self, *operations):  # noqa: N802 - Transformer Engine's name
        outer = self

        class _Sequence(tuple):
            def __call__(self, rows, *extra):
                outer.calls.append(extra)
                return rows * 2

        return _Sequence(operations)


READY = fused_mxfp8.FusionSetting((10, 0), "2.20.2", "1.32.0", None, None)


@pytest.mark.parametrize(
    ("setting", "mode", "fused"),
    [
        (READY, "mxfp8", True),
        (replace(READY, capability=(9, 0)), "mxfp8", False),
        (READY, "nvfp4", False),
        (READY, "fp8_current", False),
    ],
)
def test_only_mxfp8_is_arranged_for_fusion_and_only_where_it_can_run(
    monkeypatch: pytest.MonkeyPatch, setting: fused_mxfp8.FusionSetting, mode: str, fused: bool
):
    ops = _FakeOps()
    monkeypatch.setattr(te, "import_te", lambda: (None, ops))
    monkeypatch.setattr(te, "_without_storage", lambda op: op)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: setting.capability)
    monkeypatch.setattr(fused_mxfp8, "fusion_setting", lambda capability: replace(setting, capability=capability))
    experts = TransformerEngineExperts(num_local_experts=E, hidden_size=64, intermediate_size=128, recipe=RECIPES[mode])
    assert experts._arrangement is (fused_mxfp8.FUSED if fused else PLAIN)
    assert ops.interleave == [32 if fused else None]
    experts._mlp(torch.ones(22, 64), COUNTS, torch.ones(22))
    first, _, second = ops.calls[0]
    assert first is second


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_products_write_gradients_in_the_weights_dtype(dtype: torch.dtype):
    gate_up, down, rows, probs = _case(22)
    stub = _Stub(E)
    case = [gate_up.to(dtype), down.to(dtype), rows.bfloat16(), probs]
    _, *gradients = _run(stub, case, COUNTS, torch.randn(22, D).bfloat16())
    assert stub.gradient_dtypes == [dtype] * 2 * E
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype, torch.bfloat16, torch.float32]


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
