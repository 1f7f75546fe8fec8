"""What the checked runs are built from."""

from pathlib import Path

import pytest
import torch

from moe_framework.config.load import load_config
from tools.parity import training

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("mode", "reference", "preferred"),
    [
        ("fp8_current", None, "te"),
        ("auto8", None, "te"),
        ("fp8_current", "scaled_mm", "scaled_mm"),
        ("bf16", None, None),
        ("fp32", "loop", "loop"),
    ],
)
def test_a_quantized_mode_is_checked_quantized_also_where_bf16_is_faster(
    mode: str, reference: str | None, preferred: str | None, monkeypatch: pytest.MonkeyPatch
):
    def choose(config, device, *, preferred):
        raise RuntimeError(f"prefers {preferred}")

    monkeypatch.setattr(training, "mesh_of", lambda *_: None)
    monkeypatch.setattr(training, "choose_backend", choose)
    config = load_config("L0_sanity", [f"precision.mode={mode}"], CONFIGS)
    with pytest.raises(RuntimeError, match=f"prefers {preferred}$"):
        training.build(config, torch.device("cpu"), reference)
