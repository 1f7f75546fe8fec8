"""How far rounding alone may part a layout from one rank: derived from the format of the compute, and measured.

Layouts differ in the order of sums, in the shapes of products, and, in 8 bits, in what is quantized together. A
format with a significand of p bits rounds by at most u = 2^-p, relatively; spread evenly below that, by u/√3 in the
root mean square. Independent roundings add as squares: a token passes 2L residual writes forward, and its gradient as
many backward, so whole tensors differ by about u/√3 · √(4L), of which SAFETY times is allowed.

A tensor whose terms cancel, such as a norm's gradient, is rounded more than that, and so is all that quantized products
reach. So the reference is run once more in fp32, with the same choices of experts. Layout and reference are both off
that run by as much as rounding moves them, independently: they differ by √2 times that distance, of which SAFETY times
is allowed. The norm of the gradient may differ by as much as the whole gradient.

In fp32 a flat 1e-5 is allowed, some hundred roundings of 6e-8: it covers the sums over tokens too. On some inputs that
is not enough for a tensor that is a small difference of large terms, as gradients of a tied head and of norms of heads
can be. A change of every weight by one unit in its last place, which no implementation can tell from its own rounding,
moves it by more. So where a tensor is beyond 1e-5 and within LARGEST_MOVE, the reference is run again with its first
weights so moved, NUM_MOVES times in other directions, with the same batches and the same choices of experts, and the
tensor may be MOVE_SAFETY times as far as the farthest of these runs: a layout rounds at every step of the way, the
moved weights once. Nothing is run again where all is within 1e-5. The same holds for the gradient norm, which is made
of such tensors; losses keep 1e-5.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_framework.config.schema import Config
from moe_framework.precision.modes import compute_format

FP32 = 1e-5
SAFETY = 2.0
MEASURED_SAFETY = SAFETY * math.sqrt(2)
# Bits of the significand, the hidden one included. What is coarser than bf16 is measured.
SIGNIFICAND = {"fp32": 24, "bf16": 8}
# Half of a tensor is no rounding of any format, whatever was measured.
LARGEST = 0.5
# Nor a quarter of a loss or norm: without the sum over one of two ranks, a norm is off by 0.29.
LARGEST_SCALAR = 0.25
# A choice of experts is one number a token, not a mean over a tensor: of a hundred thousand choices the largest error
# is about five times the root mean square.
OUTLIER = 6.0
MOVE_SAFETY = 4.0
NUM_MOVES = 4
# An error in the sums shows in a tenth of a percent or more: no rounding of fp32 may excuse a hundredth of that.
LARGEST_MOVE = 1e-4


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences that count as rounding.

    Attributes:
        mode: `precision.mode`.
        format: Of the activations in it.
        unit: u of that format.
        rounding: What that format does to a gradient through the depth, SAFETY included.
        scalar: Of losses and of the gradient norm.
        tensor: Of gradients and of Adam's first moment.
        square: Of Adam's second moment.
        routing: Of the gap of a choice, relative to the layer's scores.
        updates: Sum of the learning rates, for parameters; see `parameter`.
        measured: How far fp32 is from the reference, by kind (`reference.TENSORS`, `scalars`, `routing` or `function`)
            and name; empty in fp32.
        moved: How far the reference went when its weights moved by one unit in the last place, by kind
            (`reference.TENSORS` or `scalars`) and name; only of what was beyond 1e-5, and in fp32.
    """

    mode: str
    format: str
    unit: float
    rounding: float
    scalar: float
    tensor: float
    square: float
    routing: float
    updates: float
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    moved: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def of(self, kind: str, name: str, rms: float = 0.0) -> float:
        """Return the tolerance of one number or tensor.

        Args:
            kind: One of `reference.TENSORS`, `scalars`, `routing` or `function`.
            name: Of the tensor, or of the scalar and its step.
            rms: Root mean square of a parameter.
        """
        derived = {
            "scalars": self.scalar,
            "routing": self.routing,
            "parameters": self.parameter(rms),
            "exp_avg_sq": self.square,
        }.get(kind, self.tensor)
        measured = self.measured.get(kind, {}).get(name, 0.0)
        # A reference that is not finite, or nowhere near fp32, allows nothing.
        largest = LARGEST_SCALAR if kind == "scalars" else LARGEST
        of_format = min(MEASURED_SAFETY * measured, largest) if math.isfinite(measured) else 0.0
        return max(derived, of_format, move_bound(self.moved.get(kind, {}).get(name, 0.0)))

    def parameter(self, rms: float) -> float:
        """Return the tolerance of a parameter.

        Adam moves each element by about the learning rate, whatever its gradient. Elements whose gradient is below
        its rounding may move either way: a share of about ε of all, the relative rounding of the gradient. So
        ‖a − b‖ is at most about 2 · Σ lr · √ε · √n. In fp32 that passes 1e-5 only where learning rates are high.

        Args:
            rms: Root mean square of the parameter.
        """
        return max(FP32, 2 * self.updates * math.sqrt(self.rounding) / rms) if rms else FP32


def move_bound(moved: float) -> float:
    """Return how far a tensor may be that goes so far from itself when the weights move by their last place."""
    return min(MOVE_SAFETY * moved, LARGEST_MOVE) if math.isfinite(moved) else 0.0


def derive(
    config: Config, learning_rates: list[float], measured: Mapping[str, Mapping[str, float]] | None = None
) -> Tolerances:
    """Derive the tolerances of a configuration.

    Args:
        config: Validated.
        learning_rates: Of each step.
        measured: See `Tolerances`.
    """
    mode, name, updates = config.precision.mode, compute_format(config.precision.mode), sum(learning_rates)
    unit = 2.0 ** -SIGNIFICAND[name]
    rms = unit / math.sqrt(3) * math.sqrt(4 * config.model.num_layers)
    tensor = SAFETY * rms
    if mode == "fp32":
        return Tolerances(mode, name, unit, tensor, FP32, FP32, FP32, FP32, updates)
    return Tolerances(mode, name, unit, tensor, tensor / 4, tensor, 2 * tensor, OUTLIER * rms, updates, measured or {})
