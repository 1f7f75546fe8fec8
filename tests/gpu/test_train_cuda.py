"""Whole runs on GPUs, through the documented command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
SHORT = ["train.max_steps=6", "optim.warmup_steps=2", "checkpoint.every=3", "eval.every=0"]


def _losses(directory: Path, num_ranks: int, *overrides: str) -> dict[int, float]:
    return {step: row["loss"] for step, row in _rows(directory, num_ranks, *overrides).items()}


def _rows(directory: Path, num_ranks: int, *overrides: str) -> dict[int, dict]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    command += ["train_fsdp2_ep.py", "--config-name", "L0_sanity", "device=cuda", f"run.dir={directory}"]
    environment = os.environ | {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "UB_SKIPMC": "1",
    }
    done = subprocess.run(
        [*command, *SHORT, *overrides], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (directory / "L0_sanity" / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def test_fp32_on_a_gpu_equals_the_cpu(tmp_path):
    gpu = _losses(tmp_path / "gpu", 1, "parallel.ep=1", "precision.mode=fp32")
    cpu = _losses(tmp_path / "cpu", 1, "parallel.ep=1", "precision.mode=fp32", "device=cpu")
    assert gpu.keys() == cpu.keys() == set(range(1, 7))
    for step, loss in gpu.items():
        assert loss == pytest.approx(cpu[step], rel=1e-5)


def test_bf16_follows_fp32_and_resumes_bit_for_bit_when_deterministic(tmp_path):
    deterministic = ("parallel.ep=1", "precision.mode=bf16", "train.deterministic=true")
    whole = _losses(tmp_path / "whole", 1, *deterministic)
    exact = _losses(tmp_path / "fp32", 1, "parallel.ep=1", "precision.mode=fp32")
    for step, loss in whole.items():
        assert loss == pytest.approx(exact[step], rel=5e-3)
    saved = tmp_path / "whole" / "L0_sanity" / "checkpoints" / "step_00000003"
    resumed = _losses(tmp_path / "resumed", 1, *deterministic, f"checkpoint.resume={saved}")
    assert resumed == {step: loss for step, loss in whole.items() if step > 3}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one_in_fp32_at_ep_2_and_at_dp_2(tmp_path):
    one = _rows(tmp_path / "one", 1, "parallel.ep=1", "precision.mode=fp32")
    for layout in ("parallel.ep=2", "parallel.ep=1"):
        two = _rows(tmp_path / layout.replace("=", "_"), 2, layout, "precision.mode=fp32")
        assert two.keys() == one.keys()
        # Adam hides the scale of a gradient from the loss; the norm before any step does not.
        assert two[1]["grad_norm"] == pytest.approx(one[1]["grad_norm"], rel=1e-5), layout
        for step, row in two.items():
            assert row["loss"] == pytest.approx(one[step]["loss"], rel=1e-5), (layout, step)


def test_te_trains_like_grouped_mm_under_fsdp_and_a_checkpoint_crosses_backends_and_precisions(tmp_path):
    pytest.importorskip("transformer_engine")
    one_rank = ("parallel.ep=1", "precision.mode=bf16")
    grouped = _losses(tmp_path / "grouped", 1, *one_rank, "experts.backend=grouped_mm")
    te = _losses(tmp_path / "te", 1, *one_rank, "experts.backend=te")
    fp8 = _losses(tmp_path / "fp8", 1, "parallel.ep=1", "precision.mode=fp8_current", "experts.backend=te")
    for step, loss in grouped.items():
        assert te[step] == pytest.approx(loss, rel=2e-3)
        assert fp8[step] == pytest.approx(loss, rel=1e-2)
    saved = tmp_path / "fp8" / "L0_sanity" / "checkpoints" / "step_00000003"
    resumed = _losses(tmp_path / "resumed", 1, *one_rank, "experts.backend=grouped_mm", f"checkpoint.resume={saved}")
    assert sorted(resumed) == [4, 5, 6]
    for step, loss in resumed.items():
        assert loss == pytest.approx(fp8[step], rel=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", ["bf16", "fp8_current"])
def test_te_with_experts_on_two_gpus_equals_one(tmp_path, mode):
    pytest.importorskip("transformer_engine")
    settings = (f"precision.mode={mode}", "experts.backend=te")
    one = _rows(tmp_path / "one", 1, "parallel.ep=1", *settings)
    two = _rows(tmp_path / "two", 2, "parallel.ep=2", *settings)
    # Two bf16 roundings (2^-9 each) differ where sums are split; an FP8 scale per rank instead of one moves each
    # factor by up to half of 2^-3, which averages out over the 128 terms of a sum. A factor of two would not pass.
    assert two[1]["grad_norm"] == pytest.approx(one[1]["grad_norm"], rel=4e-3 if mode == "bf16" else 2e-2)
    for step, row in two.items():
        assert row["loss"] == pytest.approx(one[step]["loss"], rel=2e-3 if mode == "bf16" else 1e-2), step


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_te_under_activation_checkpointing_trains_as_without(tmp_path, mode):
    pytest.importorskip("transformer_engine")
    settings = ("parallel.ep=1", "precision.mode=fp8_current", "experts.backend=te", "train.max_steps=3")
    plain = _rows(tmp_path / "plain", 1, *settings)
    checkpointed = _rows(tmp_path / mode, 1, *settings, f"train.activation_checkpointing={mode}")
    assert checkpointed.keys() == plain.keys()
    for step, row in checkpointed.items():
        # The recomputed values are the same bits; only the order of atomic sums on the GPU may differ.
        assert row["loss"] == pytest.approx(plain[step]["loss"], rel=1e-4)
        assert row["grad_norm"] == pytest.approx(plain[step]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_compiled_blocks_loss_and_optimizer_train_as_eager_ones(tmp_path, checkpointing):
    settings = ("parallel.ep=1", "precision.mode=bf16", f"train.activation_checkpointing={checkpointing}")
    eager = _rows(tmp_path / "eager", 1, *settings)
    compiled = _rows(tmp_path / "compiled", 1, *settings, "train.compile=true")
    # Fused, intermediate values keep fp32 where eager operations round to bf16 (2^-9 each).
    assert compiled[1]["grad_norm"] == pytest.approx(eager[1]["grad_norm"], rel=4e-3)
    for step, row in compiled.items():
        assert row["loss"] == pytest.approx(eager[step]["loss"], rel=2e-3), step
