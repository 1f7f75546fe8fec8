"""Speed and memory: floating-point operations per token, peaks of known GPUs, step time, peak memory."""

import re
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

# Dense (not sparse) FLOP/s of one GPU, by whole words of its name (an RTX A1000 is no A100); the first match counts, so
# that variants with fewer cores or lower clocks stand before the model they share a name with.
# Source: NVIDIA's data sheets of the A100, H100, H200, GH200 and GB200 NVL72, and the Blackwell Architecture Technical
# Brief for HGX B200 (from H100 on they list tensor-core numbers with sparsity, which are twice the dense ones).
_PEAK_FLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("A100", {"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12}),
    ("H100 PCIe", {"bf16": 756e12, "tf32": 378e12, "fp32": 51e12}),
    ("H100 NVL", {"bf16": 835.5e12, "tf32": 417.5e12, "fp32": 60e12}),
    ("H100", {"bf16": 989.5e12, "tf32": 494.5e12, "fp32": 67e12}),
    ("H200 NVL", {"bf16": 835.5e12, "tf32": 417.5e12, "fp32": 60e12}),
    ("H200", {"bf16": 989.5e12, "tf32": 494.5e12, "fp32": 67e12}),
    ("GH200", {"bf16": 989.5e12, "tf32": 494.5e12, "fp32": 67e12}),
    ("GB200", {"bf16": 2.5e15, "tf32": 1.25e15, "fp32": 80e12}),
    ("B200", {"bf16": 2.25e15, "tf32": 1.1e15, "fp32": 80e12}),
)

_TORCH_DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}


def flops_per_token(num_active_params: int, num_layers: int, num_heads: int, head_dim: int, seq_length: int) -> float:
    """Floating-point operations of one token's forward and backward pass, without recomputation.

    Each weight that a token passes costs 2 forward and 4 backward. Under a causal mask a token attends to half of
    the row on average; documents packed into one row attend to less, so for them the number is an upper bound.

    Args:
        num_active_params: Parameters that a token is multiplied with: attention, router, its top-k experts
            and the output head, without the embedding table.
        num_layers: Decoder blocks.
        num_heads: Query heads.
        head_dim: Channels per head.
        seq_length: Tokens per row.

    Returns:
        FLOP per token.

    Source: PaLM (Chowdhery et al., 2022), appendix B, 6N + 12·L·H·Q·T, with the attention term halved for the
        causal mask as in Megatron-LM's count.
    """
    return 6.0 * num_active_params + 6.0 * num_layers * num_heads * head_dim * seq_length


def peak_flops(device_type: str, device_name: str, dtype_name: str) -> float:
    """Peak of one device: from the data sheet for a known GPU, else measured by a short matrix product.

    Args:
        device_type: `cuda` or `cpu`.
        device_name: The GPU's name as torch reports it; unused for a CPU.
        dtype_name: `bf16`, `fp32`, or `tf32` (fp32 products on tensor cores).

    Returns:
        FLOP/s.
    """
    if device_type == "cuda":
        for words, peaks in _PEAK_FLOPS:
            if re.search(rf"\b{words}\b", device_name, re.IGNORECASE):
                return peaks[dtype_name]
    return measured_peak_flops(_TORCH_DTYPES[dtype_name], torch.device(device_type))


@cache
def measured_peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Speed of a square matrix product with this process's threads, measured once in under 0.3 s.

    Args:
        dtype: Format of both factors.
        device: Where to measure.

    Returns:
        FLOP/s, the median of a few products. A machine that other ranks use at the same time measures slower.
    """
    size = 4096 if device.type == "cuda" else 512
    a, b = torch.ones(2, size, size, dtype=dtype, device=device)
    seconds: list[float] = []
    _timed_product(a, b)  # the first one also loads the library
    started = time.perf_counter()
    while len(seconds) < 3 or (len(seconds) < 15 and time.perf_counter() - started < 0.15):
        seconds.append(_timed_product(a, b))
    return 2.0 * size**3 / statistics.median(seconds)


def _timed_product(a: torch.Tensor, b: torch.Tensor) -> float:
    started = time.perf_counter()
    torch.mm(a, b)
    if a.device.type == "cuda":
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - started


def model_flops_utilization(tokens_per_second: float, flops_each_token: float, total_peak_flops: float) -> float:
    """Share of the hardware's peak that the model's own operations use (MFU), 0 to 1.

    Args:
        tokens_per_second: Tokens/s of all ranks together.
        flops_each_token: From `flops_per_token`.
        total_peak_flops: FLOP/s of all devices together.
    """
    return tokens_per_second * flops_each_token / total_peak_flops


def peak_rss_bytes() -> int:
    """Largest resident memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory in bytes: allocated on the GPU by this process, or resident for a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_rss_bytes()


@dataclass(frozen=True)
class StepTime:
    """Time of one step.

    Attributes:
        seconds: From the end of the step before, without pauses.
        tokens_per_second: Tokens of all ranks per second.
    """

    seconds: float
    tokens_per_second: float


class StepTimer:
    """Measures steps without a gap: each lasts from the end of the one before, pauses such as an evaluation left out.

    So whatever happens between two steps, such as reading data and writing figures, counts with the later one. On a GPU
    a step ends for the caller when it has its loss; the optimizer's update, enqueued after that, counts with the next
    step, whose loss waits for it. Before a pause the caller must have waited for the device, or what is enqueued would
    run during the pause and not be counted.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._counted = 0.0
        self._since: float | None = None

    @property
    def counted(self) -> float:
        """Seconds between the end of the last step and a pause; they count with the next step, if there is one."""
        return self._counted

    def start(self) -> None:
        """Begin the first step, or go on after a pause."""
        self._since = self._clock()

    def pause(self) -> None:
        """Count no time until `start`."""
        assert self._since is not None, "not started"
        self._counted += self._clock() - self._since
        self._since = None

    def lap(self, num_tokens: int) -> StepTime:
        """End a step and begin the next one.

        Args:
            num_tokens: Tokens of the ended step over all ranks.

        Returns:
            Its time.
        """
        assert self._since is not None, "not started"
        now = self._clock()
        seconds = self._counted + now - self._since
        self._counted, self._since = 0.0, now
        return StepTime(seconds, num_tokens / seconds if seconds > 0 else 0.0)
