"""The host: GPUs and the links between them, memory, and what Triton needs to compile its kernels."""

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.benchmarks.machine import describe

# In the order in which Triton looks for them.
_COMPILERS = ("cc", "gcc", "clang")
_NVIDIA_SMI_TIMEOUT_S = 30


@dataclass(frozen=True)
class Gpu:
    """One CUDA device.

    Attributes:
        name: As its driver calls it.
        memory_bytes: All of its memory.
        capability: CUDA compute capability.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class NvLinks:
    """The active NVLinks of one GPU.

    Attributes:
        gpu: Its index.
        links: How many.
        gigabytes_per_s: Sum of their rates, in one direction.
    """

    gpu: int
    links: int
    gigabytes_per_s: float


@dataclass(frozen=True)
class Machine:
    """This host.

    Attributes:
        cpu: Model name.
        cores: Cores that this process may use.
        memory_bytes: Physical memory.
        gpus: The CUDA devices that this process sees.
        driver: Version of NVIDIA's driver; None if nvidia-smi does not say.
        nvlinks: Per GPU; empty if nvidia-smi does not say.
        without_peer_access: Pairs of GPUs that cannot read each other's memory.
        host_compiler: Path of the C compiler that Triton would use; None without one.
        python_headers: Whether Python.h is there, which Triton's launchers include.
    """

    cpu: str
    cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    driver: str | None
    nvlinks: tuple[NvLinks, ...]
    without_peer_access: tuple[tuple[int, int], ...]
    host_compiler: str | None
    python_headers: bool

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability of the first GPU; None without one."""
        return self.gpus[0].capability if self.gpus else None

    @property
    def device_name(self) -> str:
        """What a rank would run on, for a sentence."""
        return self.gpus[0].name if self.gpus else "this machine's CPU"


def examine_machine() -> Machine:
    """Look at this host."""
    gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count())) if torch.cuda.is_available() else ()
    host = describe(torch.device("cpu"))
    compilers = [path for path in map(shutil.which, _COMPILERS) if path]
    return Machine(
        cpu=host.cpu,
        cores=host.cores,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus,
        driver=_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0].strip() or None,
        nvlinks=parse_nvlinks(_nvidia_smi("nvlink", "-s")),
        without_peer_access=tuple(
            (a, b)
            for a in range(len(gpus))
            for b in range(len(gpus))
            if a != b and not torch.cuda.can_device_access_peer(a, b)
        ),
        host_compiler=compilers[0] if compilers else None,
        python_headers=(Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
    )


def parse_nvlinks(text: str) -> tuple[NvLinks, ...]:
    """Read what `nvidia-smi nvlink -s` prints.

    Args:
        text: A line `GPU 0: …`, then one line `Link 3: 26.562 GB/s` per active link, and so on.

    Returns:
        The GPUs in order.
    """
    rates: dict[int, list[float]] = {}
    gpu = None
    for line in text.splitlines():
        if heading := re.match(r"\s*GPU (\d+):", line):
            gpu = int(heading[1])
            rates[gpu] = []
        elif gpu is not None and (link := re.match(r"\s*Link \d+: ([\d.]+) GB/s", line)):
            rates[gpu].append(float(link[1]))
    return tuple(NvLinks(gpu, len(found), round(sum(found), 3)) for gpu, found in rates.items())


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    return Gpu(properties.name, properties.total_memory, (properties.major, properties.minor))


def _nvidia_smi(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
