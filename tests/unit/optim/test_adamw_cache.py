"""What an earlier run on the machine has compiled must not change the update."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from moe_framework.optim.adamw import build_adamw

SETTINGS = (
    {"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    {"lr": 3e-4, "weight_decay": 0.05, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6},
)


class Model(nn.Module):
    """Parameters that decay and that do not."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(7, 5, generator=generator))
        self.norm = nn.Parameter(torch.ones(32))


def updated(settings: dict[str, float], *, compiled: bool) -> dict[str, torch.Tensor]:
    """The parameters after three steps."""
    model = Model()
    optimizer = build_adamw(model, compiled=compiled, **settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step_clipped(torch.tensor(2.0), 0.5)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def main(number: int) -> None:
    """In a process of its own: compare the compiled update with the plain one."""
    settings = SETTINGS[number]
    plain = updated(settings, compiled=False)
    for name, value in updated(settings, compiled=True).items():
        torch.testing.assert_close(value, plain[name], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_with_other_numbers_do_not_share_what_is_compiled_on_disk(tmp_path: Path):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for number in (0, 1, 0):
        command = [sys.executable, "-c", f"from tests.unit.optim.test_adamw_cache import main; main({number})"]
        root = Path(__file__).resolve().parents[3]
        ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280)
        assert ended.returncode == 0, f"settings {number}: {ended.stderr}"
