"""The findings together, as text and as JSON."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_framework.errors import ConfigError
from tools.diagnosis.backends import AttentionFinding, ExpertsFinding, FusionFinding
from tools.diagnosis.configuration import ConfigurationFinding
from tools.diagnosis.machine import Machine
from tools.diagnosis.precision import ModeFinding
from tools.diagnosis.software import Software


@dataclass(frozen=True)
class Diagnosis:
    """All findings.

    Attributes:
        machine: The host.
        software: What is installed.
        modes: Precision modes.
        fusion: Fused MXFP8 experts.
        configuration: Of the given name; None where none was given.
        experts: Expert backends for it; None where it is not valid here.
        attention: Attention kernels for it; empty likewise.
    """

    machine: Machine
    software: Software
    modes: tuple[ModeFinding, ...]
    fusion: FusionFinding
    configuration: ConfigurationFinding | None = None
    experts: ExpertsFinding | None = None
    attention: tuple[AttentionFinding, ...] = ()


def to_text(found: Diagnosis) -> str:
    """Return the report for people."""
    sections = [
        _section("Machine", _machine_rows(found.machine)),
        _section("Software", _software_rows(found.software)),
        _section("Precision modes", ((f.mode, _yes(f.available), f.reason) for f in found.modes)),
        _section("Fused MXFP8 experts", _fusion_rows(found.fusion)),
    ]
    if found.experts is not None:
        sections.append(_section("Expert backends", _expert_rows(found.experts)))
    if found.attention:
        sections.append(_section("Attention kernels, preferred first", map(_attention_row, found.attention)))
    if found.configuration is not None:
        name, ranks = found.configuration.name, found.configuration.ranks
        title = f"Configuration {name}, {ranks} {'rank' if ranks == 1 else 'ranks'} on this host"
        sections.append(_section(title, _configuration_rows(found.configuration)))
    return "\n\n".join(sections)


def write_json(found: Diagnosis, path: Path) -> None:
    """Write every finding.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json={path}: cannot be written ({error.strerror}). Give a file in a folder.") from error


def _section(title: str, rows: Iterable[tuple[str | None, ...]]) -> str:
    table = [tuple(cell or "" for cell in row) for row in rows]
    columns = range(max(map(len, table), default=0))
    # A row's last cell may be a sentence, so it widens no column.
    widths = [max((len(row[i]) for row in table if i + 1 < len(row)), default=0) for i in columns]
    lines = ["  " + "  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip() for row in table]
    return "\n".join([title, *lines])


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _machine_rows(machine: Machine) -> Iterable[tuple[str, str]]:
    yield "CPU", f"{machine.cores} cores of {machine.cpu}, {machine.memory_bytes / 2**30:.1f} GiB"
    if not machine.gpus:
        yield "GPU", "none"
    for index, gpu in enumerate(machine.gpus):
        capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
        yield f"GPU {index}", f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB, compute capability {capability}"
    if machine.gpus:
        yield "driver", machine.driver or "unknown (nvidia-smi does not say)"
        yield "NVLink", _links(machine)
        yield "peer access", _peers(machine)
    compiler = machine.host_compiler or "none (Triton needs cc, gcc or clang)"
    yield "C compiler", compiler + ("" if machine.python_headers else "; Python.h is missing, which Triton needs")


def _links(machine: Machine) -> str:
    linked = [f"GPU {x.gpu}: {x.links} links, {x.gigabytes_per_s:g} GB/s" for x in machine.nvlinks if x.links]
    return "; ".join(linked) or "none found by nvidia-smi"


def _peers(machine: Machine) -> str:
    if len(machine.gpus) < 2:
        return "one GPU"
    pairs = ", ".join(f"{a} to {b}" for a, b in machine.without_peer_access)
    return f"missing from {pairs}" if pairs else "between all GPUs"


def _software_rows(software: Software) -> Iterable[tuple[str, str, str]]:
    for name, version in software.libraries.items():
        yield name, version or "none", ""
    for package in software.packages:
        problem = f": {package.problem}" if package.problem and package.version else ""
        yield package.name, package.version or "not installed", f"{package.needed_for}{problem}"


def _fusion_rows(fusion: FusionFinding) -> Iterable[tuple[str, ...]]:
    yield ("active",) if fusion.active else ("not active; each condition that is not met:",)
    yield from ((f"- {obstacle}",) for obstacle in fusion.obstacles)


def _expert_rows(experts: ExpertsFinding) -> Iterable[tuple[str, str]]:
    yield "chosen", f"{experts.chosen or 'none'} ({experts.reason})"
    for name, obstacle in experts.obstacles.items():
        yield name, f"no: {obstacle}" if obstacle else "can compute them"


def _attention_row(kernel: AttentionFinding) -> tuple[str, str]:
    if kernel.causal == kernel.packed:
        return kernel.kernel, f"no: {kernel.causal}" if kernel.causal else "yes"
    single = "no: " + kernel.causal if kernel.causal else "yes"
    packed = "no: " + kernel.packed if kernel.packed else "yes"
    return kernel.kernel, f"one document a row: {single}; several: {packed}"


def _configuration_rows(configuration: ConfigurationFinding) -> Iterable[tuple[str, ...]]:
    yield from ((line,) for line in (configuration.sizes or "").splitlines())
    if not configuration.violations:
        yield ("no violations",)
    else:
        count = len(configuration.violations)
        yield ("1 violation:" if count == 1 else f"{count} violations:",)
        yield from ((f"- {violation}",) for violation in configuration.violations)
