"""What the numbers were measured on."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Machine:
    """The machine and the software.

    Attributes:
        cpu: Model name.
        cores: Cores that this process may use.
        cpu_capability: The vector instructions that torch uses.
        gpu: Name of the GPU, or None if none is measured.
        torch_version: Version of torch.
        threads: Threads of torch in this process; each rank of the dispatch part has one.
        load_average: Mean number of running processes in the last minute before the start.
    """

    cpu: str
    cores: int
    cpu_capability: str
    gpu: str | None
    torch_version: str
    threads: int
    load_average: float

    def sentence(self) -> str:
        """Return one line for a report."""
        gpu = f"{self.gpu}; " if self.gpu else ""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return (
            f"{gpu}{self.cores} cores of {self.cpu} ({self.cpu_capability}), torch {self.torch_version}, "
            f"{threads}, load average {self.load_average:.1f} at the start"
        )


def describe(device: torch.device) -> Machine:
    """Describe this machine.

    Args:
        device: What is measured.

    Returns:
        The description.
    """
    return Machine(
        cpu=_cpu_model(),
        # The cores that this process is allowed, which in a container can be fewer than there are.
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        load_average=os.getloadavg()[0],
    )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
