"""Choice of an expert backend: by name, by what can compute the shapes, or by which is fastest on this device."""

import importlib.util
from dataclasses import dataclass
from functools import partial

import torch

from moe_framework.errors import ConfigError, DependencyError
from moe_framework.moe.experts.base import ExpertBackend
from moe_framework.moe.experts.grouped_mm import grouped_mm_experts, unsupported_reason
from moe_framework.moe.experts.loop import loop_experts
from moe_framework.moe.experts.measure import milliseconds
from moe_framework.moe.experts.mxfp8_emulated import mxfp8_emulated_experts
from moe_framework.moe.experts.te import TransformerEngineExperts
from moe_framework.precision.policy import PrecisionPolicy

EMULATED = "mxfp8_emulated"

# Those without state, which compute in the dtype of what they are given.
BACKENDS: dict[str, ExpertBackend] = {"loop": loop_experts, "grouped_mm": grouped_mm_experts}


@dataclass(frozen=True)
class ExpertShape:
    """The work of one layer's experts on one rank.

    Attributes:
        num_local_experts: Experts e of the rank.
        hidden_size: D.
        intermediate_size: F.
        num_rows: Token copies R that a micro-batch brings, when load is even.
    """

    num_local_experts: int
    hidden_size: int
    intermediate_size: int
    num_rows: int


@dataclass(frozen=True)
class Choice:
    """Which backend computes the experts, and why.

    Attributes:
        name: The backend.
        reason: For the log, one line or a table.
    """

    name: str
    reason: str


def make_backend(name: str, shape: ExpertShape, policy: PrecisionPolicy) -> ExpertBackend:
    """Make one layer's backend; Transformer Engine keeps state per layer, the others are functions.

    Args:
        name: From a `Choice`.
        shape: The layer's.
        policy: Formats.

    Returns:
        The backend.

    Raises:
        DependencyError: Its package cannot be imported.
    """
    if name == "te":
        return TransformerEngineExperts(
            num_local_experts=shape.num_local_experts,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            recipe=policy.te_recipe,
        )
    return mxfp8_emulated_experts if name == EMULATED else BACKENDS[name]


def choose_experts(name: str, shape: ExpertShape, policy: PrecisionPolicy, device: torch.device) -> Choice:
    """Choose the backend.

    `auto` takes the only one that can compute the shapes, or, where there are several, times them on this device.
    A quantized mode says what may be quantized: where bf16 is faster, as for many small experts on Hopper, it wins.

    Args:
        name: `experts.backend`.
        shape: The work.
        policy: Formats.
        device: This rank's.

    Returns:
        The choice. Other ranks may measure differently: let one choose and tell the others.

    Raises:
        ConfigError: The named backend cannot compute these shapes here.
        DependencyError: The named backend's package is missing.
    """
    obstacles = _obstacles(shape, policy, device)
    if name != "auto":
        if (obstacle := obstacles.get(name)) is not None:
            kind = DependencyError if name == "te" and "import" in obstacle else ConfigError
            raise kind(f"experts.backend={name} cannot be used: {obstacle}. Set experts.backend=auto.")
        return Choice(name, "set in the configuration")
    if policy.mode == EMULATED:
        return Choice(EMULATED, "the precision mode's own backend")
    usable = [candidate for candidate in ("te", "grouped_mm") if obstacles[candidate] is None]
    if not usable:
        return Choice("loop", f"grouped_mm cannot be used: {obstacles['grouped_mm']}")
    if len(usable) == 1:
        other = "te" if usable == ["grouped_mm"] else "grouped_mm"
        return Choice(usable[0], f"{other} cannot be used: {obstacles[other]}")
    return _fastest(usable, shape, policy, device)


def _fastest(names: list[str], shape: ExpertShape, policy: PrecisionPolicy, device: torch.device) -> Choice:
    times = {}
    for name in names:
        times[name] = milliseconds(
            partial(make_backend, name, shape, policy),
            num_local_experts=shape.num_local_experts,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_rows=shape.num_rows,
            dtype=policy.compute_dtype,
            device=device,
        )
    best = min(times, key=times.__getitem__)
    formats = {"te": policy.mode, "grouped_mm": "bf16"}
    table = ", ".join(f"{name} in {formats[name]} {times[name]:.2f} ms" for name in names)
    return Choice(best, f"fastest of: {table}; one layer, forward and backward, {shape.num_rows} rows")


def _obstacles(shape: ExpertShape, policy: PrecisionPolicy, device: torch.device) -> dict[str, str | None]:
    """Why each backend cannot be used, or None."""
    grouped = unsupported_reason(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        dtype=policy.compute_dtype,
        device_type=device.type,
    )
    emulated = f"precision.mode={policy.mode} is quantized by another backend"
    if policy.mode == EMULATED:
        grouped = grouped or "precision.mode=mxfp8_emulated would not be emulated"
    return {
        "te": _te_obstacle(shape, policy, device),
        "grouped_mm": grouped,
        EMULATED: None if policy.mode == EMULATED else emulated,
    }


def _te_obstacle(shape: ExpertShape, policy: PrecisionPolicy, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "Transformer Engine needs a CUDA device"
    if policy.compute_dtype != torch.bfloat16 or policy.mode == EMULATED:
        return f"it computes in bf16 or quantized from it, not in precision.mode={policy.mode}"
    if importlib.util.find_spec("transformer_engine") is None:
        return "it needs transformer_engine, which failed to import (not installed). Install '.[te]'"
    multiple = 16
    for name, size in (("hidden_size", shape.hidden_size), ("intermediate_size", shape.intermediate_size)):
        if policy.te_recipe is not None and size % multiple:
            return f"{name}={size} is no multiple of {multiple}, which {policy.mode} needs"
    return None
