"""The memory of the machines that a configuration can be for."""

import subprocess
from dataclasses import dataclass

from moe_framework.precision.modes import TARGETS, Capability

_TIMEOUT_S = 10
# GB of one GPU as NVIDIA's data sheets name it: A100 80GB (SXM and PCIe), H100 SXM, H200 SXM, a B200 of an HGX B200.
DATA_SHEET_GB = {"a100": 80, "h100": 80, "h200": 141, "b200": 180}


@dataclass(frozen=True)
class Memory:
    """What an estimate is compared with.

    Attributes:
        num_bytes: Of one GPU.
        owner: Whose it is and who says so, for a sentence.
        capability: The GPU's CUDA compute capability.
    """

    num_bytes: int
    owner: str
    capability: Capability | None


def target_memory(target: str) -> Memory | None:
    """Return the memory of a target's GPU by its data sheet, with GB taken as 10^9 bytes.

    A device itself reports a few percent more, which the CUDA context, NCCL's buffers and the gaps between
    allocations take.

    Args:
        target: `hardware.target`.

    Returns:
        The memory; None where there is no such GPU.
    """
    size = DATA_SHEET_GB.get(target)
    return None if size is None else Memory(size * 10**9, f"one {target.upper()} (data sheet)", TARGETS[target])


def installed_memory() -> Memory | None:
    """Ask nvidia-smi for the smallest GPU of this machine; torch would take seconds to answer.

    Returns:
        Its memory; None where there is no GPU, or no nvidia-smi.
    """
    query = ["nvidia-smi", "--query-gpu=memory.total,compute_cap,name", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return smallest_memory(text)


def smallest_memory(text: str) -> Memory | None:
    """Read what nvidia-smi prints.

    Args:
        text: A line `143771, 9.0, NVIDIA H200` for each GPU: MiB, compute capability, name.

    Returns:
        The smallest of them; None where no line says how much there is.
    """
    rows = [[cell.strip() for cell in line.split(",", 2)] for line in text.splitlines()]
    known = [row for row in rows if len(row) == 3 and row[0].isdigit()]
    if not known:
        return None
    size, capability, name = min(known, key=lambda row: int(row[0]))
    major, _, minor = capability.partition(".")
    is_known = major.isdigit() and minor.isdigit()
    return Memory(int(size) * 2**20, f"one {name}", (int(major), int(minor)) if is_known else None)
