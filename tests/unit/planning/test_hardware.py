import subprocess

import pytest

from moe_framework.planning import hardware
from moe_framework.planning.hardware import Memory, installed_memory, smallest_memory, target_memory
from moe_framework.precision.modes import TARGETS


@pytest.mark.parametrize(("target", "size"), [("a100", 80), ("h100", 80), ("h200", 141), ("b200", 180)])
def test_targets_have_the_memory_of_their_data_sheets(target: str, size: int):
    memory = target_memory(target)
    assert memory == Memory(size * 10**9, f"one {target.upper()} (data sheet)", TARGETS[target])


def test_every_target_with_a_gpu_has_a_memory():
    assert {name for name in TARGETS if target_memory(name)} == TARGETS.keys() - {"cpu"}
    assert target_memory("auto") is None


def test_the_smallest_gpu_of_a_machine_counts():
    text = "143771, 9.0, NVIDIA H200\n24576, 8.9, NVIDIA RTX 4090, 24 GB\n"
    assert smallest_memory(text) == Memory(24576 * 2**20, "one NVIDIA RTX 4090, 24 GB", (8, 9))


@pytest.mark.parametrize("text", ["", "[N/A], 9.0, NVIDIA H200\n", "Failed to initialize NVML\n"])
def test_what_nvidia_smi_does_not_say_is_not_known(text: str):
    assert smallest_memory(text) is None


def test_a_gpu_of_unknown_capability_still_has_a_memory():
    assert smallest_memory("100, [N/A], A GPU\n") == Memory(100 * 2**20, "one A GPU", None)


def test_a_machine_without_nvidia_smi_has_no_gpu_to_compare_with(monkeypatch: pytest.MonkeyPatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    assert hardware.subprocess.run is missing
    assert installed_memory() is None
