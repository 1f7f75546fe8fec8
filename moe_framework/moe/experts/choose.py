"""Choice of an expert backend: by name, by what can compute the shapes, or by which is fastest on this device."""

import importlib.util
from dataclasses import dataclass
from functools import partial

import torch

from moe_framework.errors import ConfigError, DependencyError, MoeFrameworkError
from moe_framework.moe.experts.base import ExpertBackend
from moe_framework.moe.experts.grouped_mm import grouped_mm_experts, unsupported_reason
from moe_framework.moe.experts.loop import loop_experts
from moe_framework.moe.experts.measure import milliseconds
from moe_framework.moe.experts.mxfp8_emulated import BLOCK, mxfp8_emulated_experts
from moe_framework.moe.experts.scaled_mm import WIDTH_ALIGNMENT, scaled_mm_experts
from moe_framework.moe.experts.sequential import sequential_experts
from moe_framework.moe.experts.te import TransformerEngineExperts
from moe_framework.precision.modes import EMULATED
from moe_framework.precision.policy import PrecisionPolicy

# Those without state, which compute in the dtype of what they are given.
BACKENDS: dict[str, ExpertBackend] = {
    "loop": loop_experts,
    "grouped_mm": grouped_mm_experts,
    "sequential": sequential_experts,
}
# Those that quantize by themselves, each in one mode; and what computes a layer of theirs that stays in bf16.
SCALED_MM_MODE = "fp8_current"
QUANTIZED: dict[str, tuple[str, ExpertBackend]] = {
    "scaled_mm": (SCALED_MM_MODE, scaled_mm_experts),
    EMULATED: (EMULATED, mxfp8_emulated_experts),
}
PLAIN_INSTEAD = {"scaled_mm": "sequential", EMULATED: "grouped_mm"}
# What `auto` considers.
_CANDIDATES = {"cuda": ("te", "scaled_mm", "grouped_mm", "sequential"), "cpu": ("te", "grouped_mm")}


@dataclass(frozen=True)
class ExpertShape:
    """The work of one layer's experts on one rank.

    Attributes:
        num_local_experts: Experts e of the rank.
        hidden_size: D.
        intermediate_size: F of the rank's slice of them.
        num_rows: Token copies R that a micro-batch brings, when load is even.
        expert_tp: Ranks that share the whole width.
        float32_weights: Whether the backend gets the master weights, as where no other rank shares them.
    """

    num_local_experts: int
    hidden_size: int
    intermediate_size: int
    num_rows: int
    expert_tp: int = 1
    float32_weights: bool = False


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
        ConfigError: It quantizes in another mode than the policy's.
    """
    if name == "te":
        return TransformerEngineExperts(
            num_local_experts=shape.num_local_experts,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            recipe=policy.te_recipe,
        )
    if name in BACKENDS:
        return BACKENDS[name]
    mode, backend = QUANTIZED[name]
    if policy.mode != mode:
        raise ConfigError(f"experts.backend={name} computes in {mode} alone, not in {policy.mode}.")
    return backend


def choose_experts(
    name: str,
    shape: ExpertShape,
    policy: PrecisionPolicy,
    device: torch.device,
    *,
    preferred: str | None = None,
    measure: bool = True,
) -> Choice:
    """Choose the backend.

    `auto` takes the only one that can compute the shapes, or, where there are several, times them on this device.
    A named backend never drops the quantization that was asked for; a measurement may, where bf16 is faster, as for
    many small experts on Hopper. A run that trained quantized goes on so.

    Args:
        name: `experts.backend`.
        shape: The work.
        policy: Formats.
        device: This rank's.
        preferred: What a checkpoint was trained with: taken by `auto` without timing, where it can be used, because
            two close times would otherwise let a resumed run go on with another backend.
        measure: Time the candidates where there are several; False leaves it open and names them all.

    Returns:
        The choice. Other ranks may measure differently: let one choose and tell the others.

    Raises:
        ConfigError: The named backend cannot compute these shapes here.
        DependencyError: The named backend's package is missing.
    """
    obstacles = backend_obstacles(shape, policy, device)
    if name != "auto":
        if (obstacle := obstacles.get(name)) is not None:
            raise _error(f"experts.backend={name} cannot be used: {obstacle}. Set experts.backend=auto.", obstacle)
        if policy.te_recipe is not None and name in BACKENDS:
            raise ConfigError(
                f"experts.backend={name} computes in bf16, so precision.mode={policy.mode} would not be quantized. "
                "Set experts.backend=auto, or precision.mode=bf16."
            )
        return Choice(name, "set in the configuration")
    if policy.mode == EMULATED:
        if (obstacle := obstacles[EMULATED]) is not None:
            raise _error(f"precision.mode={EMULATED} cannot be used: {obstacle}.", obstacle)
        return Choice(EMULATED, "the precision mode's own backend")
    candidates = [name for name in _CANDIDATES[device.type] if name != "scaled_mm" or policy.mode == SCALED_MM_MODE]
    usable = _usable(candidates, obstacles, policy, preferred)
    if not usable:
        return Choice("loop", f"grouped_mm cannot be used: {obstacles['grouped_mm']}")
    if len(usable) == 1:
        others = [f"{name} cannot be used: {obstacles[name]}" for name in candidates if name not in usable]
        return Choice(usable[0], "; ".join(others))
    if preferred is not None and preferred in usable:
        return Choice(preferred, "as in the checkpoint that is continued")
    if not measure:
        return Choice(" or ".join(usable), "the fastest of them, measured at the start of training")
    return _fastest(usable, shape, policy, device)


def _usable(
    candidates: list[str], obstacles: dict[str, str | None], policy: PrecisionPolicy, preferred: str | None
) -> list[str]:
    """The candidates without an obstacle: for a run that trained quantized, those that quantize."""
    usable = [candidate for candidate in candidates if obstacles[candidate] is None]
    if policy.te_recipe is None:
        return usable
    quantizing = [candidate for candidate in candidates if candidate not in BACKENDS]
    if not set(quantizing) & set(usable):
        # What needs no package comes last, and so does what would still stand in its way.
        obstacle = obstacles[quantizing[-1]]
        raise _error(f"precision.mode={policy.mode} cannot be used: {obstacle}.", obstacle or "")
    if preferred in quantizing and preferred not in usable:
        return [candidate for candidate in usable if candidate in quantizing]
    return usable


def _error(text: str, obstacle: str) -> MoeFrameworkError:
    return DependencyError(text) if "failed to import" in obstacle else ConfigError(text)


def _fastest(names: list[str], shape: ExpertShape, policy: PrecisionPolicy, device: torch.device) -> Choice:
    times = {}
    for name in names:
        times[name] = milliseconds(
            name,
            partial(make_backend, name, shape, policy),
            num_local_experts=shape.num_local_experts,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_rows=shape.num_rows,
            dtype=policy.compute_dtype,
            weight_dtype=torch.float32 if shape.float32_weights else policy.compute_dtype,
            device=device,
        )
    best = min(times, key=times.__getitem__)
    quantizing = [name for name in names if name not in BACKENDS] if policy.te_recipe is not None else []
    if quantizing and all(times[name] == float("inf") for name in quantizing):
        raise ConfigError(
            f"precision.mode={policy.mode}: {' and '.join(quantizing)} failed on this device; the log says why. "
            "Set precision.mode=bf16, or make the micro-batch smaller."
        )
    if times[best] == float("inf"):
        raise ConfigError(
            f"experts.backend=auto: none of {', '.join(names)} computes these experts on this device; the log says "
            "why. Set experts.backend=loop, or make the micro-batch smaller."
        )
    modes = {name: "bf16" if name in BACKENDS else policy.mode for name in names}
    table = ", ".join(f"{name} in {modes[name]} {times[name]:.2f} ms" for name in names)
    return Choice(best, f"fastest of: {table}; one layer, forward and backward, {shape.num_rows} rows")


def backend_obstacles(shape: ExpertShape, policy: PrecisionPolicy, device: torch.device) -> dict[str, str | None]:
    """Say of each backend why it cannot compute a layer.

    Args:
        shape: The work.
        policy: Formats.
        device: Where.

    Returns:
        The reason by the backend's name; None for those that can.
    """
    grouped = unsupported_reason(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        dtype=policy.compute_dtype,
        device_type=device.type,
    )
    plain = "precision.mode=mxfp8_emulated would not be emulated" if policy.mode == EMULATED else None
    return {
        "loop": plain,
        "sequential": plain,
        "grouped_mm": plain or grouped,
        "te": _te_obstacle(shape, policy, device),
        "scaled_mm": _scaled_mm_obstacle(shape, policy, device),
        EMULATED: _emulation_obstacle(shape),
    }


def _scaled_mm_obstacle(shape: ExpertShape, policy: PrecisionPolicy, device: torch.device) -> str | None:
    if policy.mode != SCALED_MM_MODE:
        return f"it computes precision.mode={SCALED_MM_MODE}, not {policy.mode}"
    return _unaligned(shape, WIDTH_ALIGNMENT, "FP8") if device.type == "cuda" else "its products need a CUDA device"


def _emulation_obstacle(shape: ExpertShape) -> str | None:
    if importlib.util.find_spec("torchao") is None:
        return "it needs torchao, which failed to import (not installed). Install '.[mx]'"
    return _unaligned(shape, BLOCK, EMULATED)


def _unaligned(shape: ExpertShape, multiple: int, format_name: str) -> str | None:
    width, parts = shape.intermediate_size, shape.expert_tp
    own_width = f"model.intermediate_size={width}"
    if parts > 1:
        own_width = f"model.intermediate_size/parallel.expert_tp={width * parts}/{parts}={width}"
    for text, size in ((f"model.hidden_size={shape.hidden_size}", shape.hidden_size), (own_width, width)):
        if size % multiple:
            return f"{text} is no multiple of {multiple}, which {format_name} needs"
    return None


def _te_obstacle(shape: ExpertShape, policy: PrecisionPolicy, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "Transformer Engine needs a CUDA device"
    if policy.compute_dtype != torch.bfloat16 or policy.mode == EMULATED:
        return f"it computes in bf16 or quantized from it, not in precision.mode={policy.mode}"
    if importlib.util.find_spec("transformer_engine") is None:
        return "it needs transformer_engine, which failed to import (not installed). Install '.[te]'"
    return None if policy.te_recipe is None else _unaligned(shape, policy.te_recipe.width_alignment, policy.mode)
