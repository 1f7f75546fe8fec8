import time

import pytest
import torch

from moe_framework.observe import throughput
from moe_framework.observe.throughput import (
    StepTime,
    StepTimer,
    flops_per_token,
    measured_peak_flops,
    model_flops_utilization,
    peak_flops,
    peak_memory_bytes,
    peak_rss_bytes,
)


def test_flops_count_six_per_weight_and_half_a_row_of_attention():
    # One layer, one head of 64: scores and weighted sum are 2 products of 2·64 per key, half of 100 keys, times 3.
    assert flops_per_token(0, 1, 1, 64, 100) == 2 * 2 * 64 * 50 * 3
    assert flops_per_token(1000, 2, 4, 64, 100) == 6000 + 2 * 4 * (2 * 2 * 64 * 50 * 3)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "tf32", 417.5e12),
        ("NVIDIA H200", "bf16", 989.5e12),
        ("NVIDIA H200 NVL", "bf16", 835.5e12),
        ("NVIDIA GH200 480GB", "bf16", 989.5e12),
        ("NVIDIA B200", "bf16", 2.25e15),
        ("NVIDIA GB200", "bf16", 2.5e15),
    ],
)
def test_known_gpus_have_their_data_sheets_dense_peak(name: str, dtype: str, peak: float):
    assert peak_flops("cuda", name, dtype) == peak


@pytest.mark.parametrize("name", ["NVIDIA RTX A1000", "NVIDIA RTX A1000 6GB Laptop GPU", "NVIDIA XB200"])
def test_a_gpu_whose_name_only_contains_a_known_one_is_measured(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(throughput, "measured_peak_flops", lambda dtype, device: 7.0)
    assert peak_flops("cuda", name, "bf16") == 7.0


def test_a_cpus_peak_is_measured_once_and_quickly():
    measured_peak_flops.cache_clear()
    started = time.perf_counter()
    first = peak_flops("cpu", "", "fp32")
    assert time.perf_counter() - started < 3.0  # 0.3 s on an idle machine
    assert peak_flops("cpu", "", "fp32") == first
    assert 1e8 < first < 1e14


def test_measured_peak_agrees_with_a_longer_product():
    size = 1024
    a = torch.rand(size, size)
    torch.mm(a, a)
    started = time.perf_counter()
    for _ in range(3):
        torch.mm(a, a)
    longer = 3 * 2 * size**3 / (time.perf_counter() - started)
    # The unit is FLOP/s: a factor of 8 covers a busy machine, and no wrong power of two or ten.
    assert longer / 8 < measured_peak_flops(torch.float32, torch.device("cpu")) < longer * 8


def test_utilization_is_the_share_of_the_peak():
    assert model_flops_utilization(100.0, 2e9, 4e11) == 0.5


def test_peak_memory_is_in_bytes_and_does_not_shrink():
    before = peak_rss_bytes()
    block = bytearray(64 << 20)
    block[:: 1 << 12] = b"\1" * len(block[:: 1 << 12])
    during = peak_rss_bytes()
    del block
    assert 50e6 < before < 1e12
    assert during >= before
    assert peak_memory_bytes(torch.device("cpu")) >= during


def test_steps_follow_each_other_without_a_gap_and_pauses_are_left_out():
    now = iter([10.0, 12.0, 16.0, 17.0, 40.0, 42.0, 43.5])
    timer = StepTimer(clock=lambda: next(now))
    timer.start()
    assert timer.lap(1000) == StepTime(2.0, 500.0)
    assert timer.lap(1000) == StepTime(4.0, 250.0)
    timer.pause()
    assert timer.counted == 1.0
    timer.start()
    # What came before the pause, such as the last update, counts with the next step.
    assert timer.lap(1500) == StepTime(3.0, 500.0)
    assert timer.counted == 0.0
    assert timer.lap(1500).seconds == 1.5
