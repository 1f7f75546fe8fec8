"""Time of one layer's experts on this device."""

import logging
import statistics
from collections.abc import Callable

import torch

from moe_framework.moe.experts.base import ExpertBackend

logger = logging.getLogger(__name__)

_WARM_UP, _REPETITIONS = 3, 5


def milliseconds(
    name: str,
    make: Callable[[], ExpertBackend],
    *,
    num_local_experts: int,
    hidden_size: int,
    intermediate_size: int,
    num_rows: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Time a backend's forward and backward on random rows, spread evenly over the experts.

    Args:
        name: The backend's, for the log.
        make: Makes the backend.
        num_local_experts: e.
        hidden_size: D.
        intermediate_size: F.
        num_rows: R.
        dtype: Of the rows.
        weight_dtype: Of the weights.
        device: A CUDA device.

    Returns:
        Median milliseconds; infinite where the backend failed, which is logged.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator).mul_(0.02).requires_grad_()

    try:
        gate_up = random(num_local_experts, 2 * intermediate_size, hidden_size, dtype=weight_dtype)
        down = random(num_local_experts, hidden_size, intermediate_size, dtype=weight_dtype)
        rows, cotangent = random(num_rows, hidden_size), random(num_rows, hidden_size).detach()
        probs = torch.rand(num_rows, device=device, generator=generator).requires_grad_()
        counts = torch.full((num_local_experts,), num_rows // num_local_experts, device=device)
        counts[0] += num_rows - counts.sum()
        leaves, backend, times = (gate_up, down, rows, probs), make(), []
        for _ in range(_WARM_UP + _REPETITIONS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.autograd.grad(backend(*leaves, counts), leaves, cotangent)
            end.record()
            torch.cuda.synchronize(device)
            times.append(start.elapsed_time(end))
        return statistics.median(times[_WARM_UP:])
    except Exception as error:  # out of memory, a missing kernel or package, or shapes that a library asserts against
        reason = next(iter(str(error).splitlines()), "")
        logger.warning("experts.backend: %s failed and is left out (%s: %s)", name, type(error).__name__, reason)
        return float("inf")
    finally:
        torch.cuda.empty_cache()
