"""The arrangement for the fused MXFP8 MLP, in plain torch, and each condition that keeps it from running."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_framework.moe.experts import fused_mxfp8
from moe_framework.moe.experts.base import scaled_swiglu
from moe_framework.moe.experts.fused_mxfp8 import (
    FUSED,
    FusionSetting,
    deinterleave_gate_up,
    fused_mxfp8_obstacles,
    fusion_setting,
    interleave_gate_up,
    is_fused,
)

READY = FusionSetting((10, 0), "2.20.2", "1.32.0", None, None)


def test_blocks_of_gate_and_up_alternate():
    e, f, d = 2, 6, 3
    gate_up = torch.arange(e * 2 * f * d).reshape(e, 2 * f, d)
    gate, up = gate_up.chunk(2, dim=1)
    expected = torch.cat([gate[:, :2], up[:, :2], gate[:, 2:4], up[:, 2:4], gate[:, 4:], up[:, 4:]], dim=1)
    assert torch.equal(interleave_gate_up(gate_up, 2), expected)
    assert torch.equal(deinterleave_gate_up(expected, 2), gate_up)


def test_round_trip_at_the_fused_operations_size():
    gate_up = torch.randn(3, 2 * 96, 5)
    assert torch.equal(deinterleave_gate_up(interleave_gate_up(gate_up)), gate_up)
    assert FUSED.interleave == 32
    assert not torch.equal(interleave_gate_up(gate_up), gate_up)


def test_gradients_come_back_with_gate_rows_first():
    gate_up = torch.randn(2, 2 * 64, 3, requires_grad=True)
    cotangent = torch.randn(2, 2 * 64, 3)
    (grad,) = torch.autograd.grad(interleave_gate_up(gate_up), gate_up, cotangent)
    assert torch.equal(grad, deinterleave_gate_up(cotangent))


def _interleaved_swiglu(hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """As Transformer Engine describes `glu_interleave_size`: blocks of gate and linear units alternate."""
    gate, up = hidden.unflatten(-1, (-1, 2, 32)).unbind(-2)
    return torch.nn.functional.silu(gate).mul(up).flatten(-2) * probs[:, None]


def test_swiglu_of_interleaved_weights_is_swiglu_of_plain_ones():
    weight, rows, probs = torch.randn(1, 2 * 64, 8).double(), torch.randn(7, 8).double(), torch.rand(7).double()
    cotangent, gradients, outputs = torch.randn(7, 64).double(), [], []
    for arrange, activate in ((interleave_gate_up, _interleaved_swiglu), (lambda w: w, scaled_swiglu)):
        leaves = [weight.clone().requires_grad_(), rows.clone().requires_grad_(), probs.clone().requires_grad_()]
        outputs.append(activate(leaves[1] @ arrange(leaves[0])[0].T, leaves[2]))
        gradients.append(torch.autograd.grad(outputs[-1], leaves, cotangent))
    torch.testing.assert_close(outputs[0], outputs[1])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def _obstacles(setting: FusionSetting = READY, *, hidden_size: int = 128, intermediate_size: int = 192) -> list[str]:
    return fused_mxfp8_obstacles(hidden_size=hidden_size, intermediate_size=intermediate_size, setting=setting)


def test_where_every_condition_is_met_there_is_no_obstacle():
    assert _obstacles() == []
    assert _obstacles(replace(READY, capability=(10, 7), te_version="3.0", frontend_version="1.23.0")) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"capability": None}, "compute capability 10.0 to 10.7 (Blackwell); there is no CUDA device"),
        ({"capability": (9, 0)}, "compute capability 10.0 to 10.7 (Blackwell); this one has 9.0"),
        ({"capability": (12, 0)}, "this one has 12.0"),
        ({"te_version": None}, "it needs transformer-engine 2.20 or newer; it is not installed"),
        ({"te_version": "2.9.0"}, "it needs transformer-engine 2.20 or newer; 2.9.0 is installed"),
        ({"frontend_version": "1.9.1"}, "it needs nvidia-cudnn-frontend 1.23 or newer; 1.9.1 is installed"),
        ({"kernels_problem": "ImportError: cutlass"}, "CuTe kernels of nvidia-cudnn-frontend: ImportError: cutlass"),
        ({"flag_problem": "X=0 turns it off"}, "X=0 turns it off"),
        ({"deterministic": True}, "train.deterministic=true"),
    ],
)
def test_each_unmet_condition_is_named(change: dict, text: str):
    (obstacle,) = _obstacles(replace(READY, **change))
    assert text in obstacle


def test_unaligned_widths_are_named_with_their_keys():
    assert _obstacles(hidden_size=96, intermediate_size=160) == [
        "model.hidden_size=96 is no multiple of 64",
        "model.intermediate_size=160 is no multiple of 64",
    ]


def test_several_unmet_conditions_are_all_named():
    assert len(_obstacles(FusionSetting(None, None, None, "missing", "off", True), hidden_size=1)) == 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without a GPU")
def test_this_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_mxfp8, "request_te_fusion", lambda: "asked")
    setting = fusion_setting(None)
    assert (setting.capability, setting.flag_problem) == (None, "asked")
    assert setting.kernels_problem
    assert "\n" not in setting.kernels_problem


class GroupedMLP_CuTeGEMMGLU:  # noqa: N801 - the name is Transformer Engine's, by which it is recognised
    """Stands for the fused operation."""


@pytest.mark.parametrize(("operation", "fused"), [(GroupedMLP_CuTeGEMMGLU(), True), (object(), False)])
def test_the_operation_that_ran_is_recognised(operation: object, fused: bool):
    group = SimpleNamespace(_forward_ops=[(operation, [0, 1, 2])])
    assert is_fused(SimpleNamespace(_module_groups=[group])) is fused


def test_before_the_first_call_nothing_is_fused():
    assert not is_fused(SimpleNamespace(_module_groups=None))
    assert not is_fused(SimpleNamespace(_module_groups=[object()]))
    assert not is_fused(None)


def test_reasons_are_logged_once(caplog: pytest.LogCaptureFixture):
    fused_mxfp8.log_arrangement.cache_clear()
    caplog.set_level(logging.INFO, logger=fused_mxfp8.__name__)
    for _ in range(2):
        fused_mxfp8.log_arrangement(("one reason", "another"))
    (record,) = caplog.records
    assert "one reason; another" in record.message
