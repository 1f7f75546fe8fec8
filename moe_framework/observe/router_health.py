"""Whether the routers use their experts: load, imbalance, entropy, and experts that no token chose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerHealth:
    """One layer's routing over some tokens; NaN where no token was routed.

    Attributes:
        load: Share of the chosen slots by expert; sums to 1.
        max_over_mean: The busiest expert's load over the mean load: 1 is balanced, E is collapsed.
        entropy: Mean entropy of a token's router distribution, nats; ln E is undecided.
        never_used: Experts that no token chose.
    """

    load: list[float]
    max_over_mean: float
    entropy: float
    never_used: list[int]


def router_health(tokens_per_expert: Tensor, entropy_sum: Tensor, num_tokens: int) -> list[LayerHealth]:
    """Describe each layer's routing.

    Args:
        tokens_per_expert: [L, E] int64, slots by layer and expert, already summed over the data ranks.
        entropy_sum: [L] float32, the tokens' router entropies summed over the same ranks, nats.
        num_tokens: Routed tokens, over the same ranks.

    Returns:
        One entry per layer.
    """
    counts_LE: list[list[int]] = tokens_per_expert.tolist()
    entropies_L: list[float] = entropy_sum.tolist()
    return [_layer_health(counts, entropy, num_tokens) for counts, entropy in zip(counts_LE, entropies_L, strict=True)]


def _layer_health(counts: list[int], entropy_sum: float, num_tokens: int) -> LayerHealth:
    num_slots = sum(counts)
    return LayerHealth(
        load=[count / num_slots if num_slots else math.nan for count in counts],
        max_over_mean=max(counts) * len(counts) / num_slots if num_slots else math.nan,
        entropy=entropy_sum / num_tokens if num_tokens else math.nan,
        never_used=[expert for expert, count in enumerate(counts) if count == 0],
    )


def router_scalars(layers: Sequence[LayerHealth]) -> dict[str, float]:
    """Return the curves of TensorBoard by name, such as `router/layer_03/max_over_mean`."""
    scalars: dict[str, float] = {}
    for index, layer in enumerate(layers):
        prefix = f"router/layer_{index:02}"
        scalars[f"{prefix}/max_over_mean"] = layer.max_over_mean
        scalars[f"{prefix}/entropy"] = layer.entropy
        scalars[f"{prefix}/num_never_used"] = float(len(layer.never_used))
    return scalars


def max_over_mean_load(layers: Sequence[LayerHealth]) -> float:
    """Return the worst layer's max_over_mean; NaN if no layer has routed a token."""
    return max((layer.max_over_mean for layer in layers if not math.isnan(layer.max_over_mean)), default=math.nan)


class RouterHealthWindow:
    """Sums the counts of several steps, so that an expert counts as never used over the whole window only."""

    def __init__(self):
        self._tokens_per_expert: Tensor | None = None
        self._entropy_sum: Tensor | None = None
        self._num_tokens = 0

    def add(self, tokens_per_expert: Tensor, entropy_sum: Tensor, num_tokens: int) -> None:
        """Add one step's sums; arguments as for `router_health`."""
        if self._tokens_per_expert is None or self._entropy_sum is None:
            self._tokens_per_expert = torch.zeros_like(tokens_per_expert)
            # Thousands of steps' sums would round a step's share away in fp32.
            self._entropy_sum = torch.zeros_like(entropy_sum, dtype=torch.float64)
        self._tokens_per_expert += tokens_per_expert
        self._entropy_sum += entropy_sum
        self._num_tokens += num_tokens

    def take(self) -> list[LayerHealth]:
        """Return the health over the steps since the last call, and begin a new window.

        Returns:
            One entry per layer; empty if no step was added.
        """
        if self._tokens_per_expert is None or self._entropy_sum is None:
            return []
        health = router_health(self._tokens_per_expert, self._entropy_sum, self._num_tokens)
        self._tokens_per_expert, self._entropy_sum, self._num_tokens = None, None, 0
        return health
