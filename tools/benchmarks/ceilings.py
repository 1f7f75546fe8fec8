"""The rates that this device reaches when it does one thing only, measured in the run that is compared with them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tools.benchmarks.timing import Spread, elapsed

GPU_SIZE, CPU_SIZE = 8192, 256
GPU_COPY_BYTES, CPU_COPY_BYTES = 2**32, 2**22
GPU_EXCHANGE_BYTES, CPU_EXCHANGE_BYTES = 2**28, 2**18
WARM_UP, REPETITIONS = 3, 10


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of one device.

    Attributes:
        matrix_size: Rows and columns of the square products.
        bf16_flops: FLOP/s of a dense bf16 product.
        fp8_flops: FLOP/s of a dense FP8 product, one scale per tensor, fast accumulation; None where there is none.
        copy_bytes: Bytes/s read and written by a copy within the device.
        exchange_bytes: Bytes/s that a rank sends to others in an all-to-all with equal splits; None on one rank.
    """

    matrix_size: int
    bf16_flops: float
    fp8_flops: float | None
    copy_bytes: float
    exchange_bytes: float | None


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure them; of several ranks the slowest counts.

    Args:
        device: This rank's.

    Returns:
        The limits, the same on every rank.

    Collective: the world, where a process group is started; every rank must call.
    """
    on_cuda = device.type == "cuda"
    size = GPU_SIZE if on_cuda else CPU_SIZE
    bf16, fp8 = _product_rates(size, device)
    return Ceilings(size, bf16, fp8, _copy_rate(device), _exchange_rate(device))


def _product_rates(size: int, device: torch.device) -> tuple[float, float | None]:
    flop = 2.0 * size**3
    a, b = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    bf16 = flop / _seconds(lambda: a @ b, device)
    return bf16, flop / _seconds(_fp8_product(a, b), device) if _has_fp8(device) else None


def _copy_rate(device: torch.device) -> float:
    num_bytes = GPU_COPY_BYTES if device.type == "cuda" else CPU_COPY_BYTES
    source, target = torch.empty(2, num_bytes, dtype=torch.uint8, device=device)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _fp8_product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    one = torch.ones((), device=a.device)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()

    def product() -> torch.Tensor:
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return product


def _exchange_rate(device: torch.device) -> float | None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return None
    num_bytes = (GPU_EXCHANGE_BYTES if device.type == "cuda" else CPU_EXCHANGE_BYTES) // ranks * ranks
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: dist.all_to_all_single(target, source), device)
    return num_bytes * (ranks - 1) / ranks / seconds


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    for _ in range(WARM_UP):
        function()
    median = Spread.of([elapsed(function, device) for _ in range(REPETITIONS)]).median
    if not dist.is_initialized():
        return median
    slowest = torch.tensor(median, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
