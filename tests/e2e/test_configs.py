"""Every shipped configuration is valid for the machine it is meant for, without allocating the model."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARAMETERS = {
    "L1_8x7B_ep": "parameters: 46,702,792,704 (45,097,156,608 in experts), of which a token uses 12,748,853,248",
    "L1_8x7B_fsdp": "parameters: 46,702,792,704 (45,097,156,608 in experts), of which a token uses 12,748,853,248",
    "L1_8x7B_ep2_4layers": "parameters: 6,067,228,672",
    "L2_qwen3_30b_a3b_widths": "parameters: 30,532,122,624",
    "L2_weak_scaling": "parameters: 26,200,805,376 (25,769,803,776 in experts)",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_large_configuration_validates_on_a_cpu(name: str):
    command = [sys.executable, "train_fsdp2_ep.py", "--config-name", name]
    overrides = ["train.dry_run=true", "hardware.target=h200", "parallel.dp=1"]
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert PARAMETERS[name] in done.stdout


@pytest.mark.parametrize(("ranks", "warns"), [(4, True), (8, False)])
def test_a_dry_run_warns_of_too_little_memory_and_does_not_refuse(ranks: int, warns: bool):
    command = [sys.executable, "train_fsdp2_ep.py", "--config-name", "L1_8x7B_fsdp"]
    overrides = ["train.dry_run=true", "hardware.target=h200", f"parallel.dp={ranks}"]
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "one H200 (data sheet)" in done.stdout
    assert ("WARNING: the estimate, 217.3 GB, is above" in done.stdout) == warns


def test_every_shipped_configuration_is_listed_here():
    shipped = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert shipped - {"defaults", "L0_sanity"} == PARAMETERS.keys()


def test_eight_bit_experts_are_refused_early_where_there_are_none():
    command = [sys.executable, "train_fsdp2_ep.py", "--config-name", "L1_8x7B_ep"]
    overrides = ["train.dry_run=true", "hardware.target=a100", "parallel.dp=1"]
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "precision.mode=auto8 needs compute capability 9.0" in done.stderr
