"""Which precision modes this machine has, and what each other one lacks."""

from collections.abc import Mapping
from dataclasses import dataclass

from moe_framework.errors import ConfigError
from moe_framework.precision.modes import AUTO8, EMULATED, MODES, Capability, resolve_mode


@dataclass(frozen=True)
class ModeFinding:
    """One precision mode.

    Attributes:
        mode: `precision.mode`.
        available: Whether it can be used.
        reason: Why not; for `auto8`, what it becomes; None otherwise.
    """

    mode: str
    available: bool
    reason: str | None


def examine_modes(
    capability: Capability | None,
    device_name: str,
    *,
    te_problem: str | None,
    emulation_problem: str | None,
    te_problems: Mapping[str, str],
) -> tuple[ModeFinding, ...]:
    """Check every mode against a device and what is installed.

    Args:
        capability: CUDA compute capability; None for a CPU.
        device_name: For the reasons.
        te_problem: Why Transformer Engine cannot be used; None where it can.
        emulation_problem: The same of torchao.
        te_problems: By mode, why Transformer Engine says that the GPU lacks it.

    Returns:
        One finding per mode, `auto8` last.
    """
    findings = []
    for mode in (*MODES, AUTO8):
        try:
            resolved = resolve_mode(mode, capability, device_name)
        except ConfigError as error:
            findings.append(ModeFinding(mode, available=False, reason=_shortened(str(error), mode)))
            continue
        uses_te = MODES[resolved].least is not None
        problem = te_problem or te_problems.get(resolved) if uses_te else None
        if resolved == EMULATED:
            problem = emulation_problem
        becomes = f"is {resolved} here" if mode == AUTO8 else None
        findings.append(ModeFinding(mode, problem is None, problem or becomes))
    return tuple(findings)


def _shortened(message: str, mode: str) -> str:
    """The rule of an error, without the key and the remedy."""
    return message.removeprefix(f"precision.mode={mode} ").partition(". Use ")[0]


def resolved_here(mode: str, capability: Capability | None) -> str | None:
    """Return what a mode is on a device; None where the device lacks it."""
    try:
        return resolve_mode(mode, capability, "")
    except ConfigError:
        return None
