"""The reader in docs/checkpoint_format.md works as it is printed."""

import os
import re
from pathlib import Path

import pytest
import torch

from moe_framework.checkpoint.store import CheckpointStore

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_documented_ten_lines_read_a_tensor(tmp_path: Path, monkeypatch):
    text = (ROOT / "docs" / "checkpoint_format.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 10
    value = torch.randn(4, 6, 5)
    store = CheckpointStore(tmp_path / "runs/NAME/checkpoints", keep=0, async_save=False, group=None)
    store.save(200, {"model.layers.0.moe.experts.gate_up": value}, {})
    monkeypatch.chdir(tmp_path)
    assert os.getcwd() == str(tmp_path)
    found: dict = {}
    exec(program, found)
    assert torch.equal(found["tensor"], value)
