"""The precision modes by name, and the hardware each needs. Free of torch, so that validation can use it."""

from dataclasses import dataclass

from moe_framework.errors import ConfigError

Capability = tuple[int, int]

# CUDA compute capability of the machines that a config can be validated for; None for no GPU.
TARGETS: dict[str, Capability | None] = {
    "cpu": None,
    "a100": (8, 0),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
}


@dataclass(frozen=True)
class Mode:
    """One precision mode.

    Attributes:
        compute: `fp32` or `bf16`: format of activations and of gathered parameters.
        least: Smallest CUDA compute capability; None where any device will do, also a CPU.
        below: Capability from which on it is not available; None for no such limit.
        products: What quantizes the experts' products, for the error's text and the documents.
        attention: Whether attention's projections can be quantized too.
    """

    compute: str
    least: Capability | None = None
    below: Capability | None = None
    products: str = "nothing"
    attention: bool = False


AUTO8 = "auto8"
EMULATED = "mxfp8_emulated"

MODES = {
    "fp32": Mode("fp32"),
    "bf16": Mode("bf16"),
    "fp8_current": Mode("bf16", (8, 9), None, "FP8 with one scale per tensor, from the tensor itself", True),
    "fp8_delayed": Mode("bf16", (8, 9), None, "FP8 with one scale per tensor, from earlier steps", True),
    "fp8_block": Mode("bf16", (9, 0), (10, 0), "FP8 with a scale per block of 128", True),
    "mxfp8": Mode("bf16", (10, 0), None, "FP8 with a power-of-two scale per 32 elements"),
    "nvfp4": Mode("bf16", (10, 0), None, "4-bit floats with a scale per 16 elements"),
    EMULATED: Mode("bf16", None, None, "MXFP8's rounding, with the products in bf16", True),
}


def resolve_mode(mode: str, capability: Capability | None, where: str) -> str:
    """Check a mode against a device, and replace `auto8` by what the device has.

    Args:
        mode: A key of `MODES`, or `auto8`: mxfp8 on Blackwell, fp8_current on Hopper.
        capability: CUDA compute capability; None for a CPU.
        where: What the device is called in an error.

    Returns:
        A key of `MODES`.

    Raises:
        ConfigError: The device does not have the mode.
    """
    if mode == AUTO8:
        if capability is None or capability < (9, 0):
            raise ConfigError(
                f"precision.mode=auto8 needs compute capability 9.0 (Hopper) or newer; {where} has "
                f"{_text(capability)}. Use precision.mode=bf16, or mxfp8_emulated to study 8-bit experts anywhere."
            )
        return "mxfp8" if capability >= (10, 0) else "fp8_current"
    if mode in available_modes(capability):
        return mode
    needed = MODES[mode]
    limit = f" and below {_text(needed.below)}" if needed.below else ""
    raise ConfigError(
        f"precision.mode={mode} needs compute capability {_text(needed.least)} or newer{limit}; {where} has "
        f"{_text(capability)}. Use one of {', '.join(available_modes(capability))}."
    )


def compute_format(mode: str) -> str:
    """Return `fp32` or `bf16`, the format that a mode's activations have; also for `auto8`."""
    return "bf16" if mode == AUTO8 else MODES[mode].compute


def available_modes(capability: Capability | None) -> list[str]:
    """Return the modes that a device has.

    Args:
        capability: CUDA compute capability; None for a CPU.
    """
    return [
        name
        for name, mode in MODES.items()
        if mode.least is None
        or (capability is not None and capability >= mode.least and (mode.below is None or capability < mode.below))
    ]


def _text(capability: Capability | None) -> str:
    return "none, being no CUDA device" if capability is None else f"{capability[0]}.{capability[1]}"
