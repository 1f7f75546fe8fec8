"""Everything that a configuration would violate on this machine: the rules between keys, then what the host lacks."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moe_framework.config.schema import AUTO, Config
from moe_framework.config.validate import is_planned, planned_world_size, validate
from moe_framework.data.fasta import demo_path
from moe_framework.data.sources import files_of
from moe_framework.errors import ConfigError, DependencyError
from moe_framework.planning.hardware import Memory, target_memory
from moe_framework.precision.modes import AUTO8, EMULATED, MODES, resolve_mode
from moe_framework.train.build import checkpoint_dir, run_dir
from moe_framework.train.dry_run import describe_sizes, state_bytes_per_rank
from moe_framework.train.memory import describe_memory
from tools.diagnosis.machine import Machine


@dataclass(frozen=True)
class ConfigurationFinding:
    """A configuration on this machine.

    Attributes:
        name: As given.
        ranks: Ranks that it was checked for, all on this host.
        sizes: Parameters, state, steps and the memory estimate, as lines of text; None where the rules between keys
            are broken.
        violations: Every one, as complete sentences.
    """

    name: str
    ranks: int
    sizes: str | None
    violations: tuple[str, ...]


def uses_gpu(config: Config, machine: Machine) -> bool:
    """Return whether the ranks would run on GPUs here."""
    return bool(machine.gpus) and config.device != "cpu" and not is_planned(config)


def choose_ranks(config: Config, machine: Machine) -> int:
    """Choose for how many ranks to check a configuration.

    Args:
        config: Not validated yet.
        machine: This host.

    Returns:
        What its degrees ask for; with `parallel.dp=auto` as many as the GPUs allow without breaking a rule.
    """
    least = max(planned_world_size(config), 1)
    if config.parallel.dp != AUTO or not uses_gpu(config, machine):
        return least
    for ranks in range(len(machine.gpus) // least * least, least, -least):
        try:
            validate(config, world_size=ranks)
        except ConfigError:
            continue
        return ranks
    return least


def validate_here(config: Config, machine: Machine, ranks: int) -> tuple[Config | None, list[str]]:
    """Check a configuration for a number of ranks on this host.

    Args:
        config: From `load_config`.
        machine: This host.
        ranks: How many ranks are started on it.

    Returns:
        The configuration with `parallel.dp` resolved, or None where a rule between keys is broken; every violation.
    """
    valid, violations = None, []
    try:
        valid = validate(config, world_size=ranks, local_world_size=ranks, cuda_device_count=len(machine.gpus))
    except ConfigError as error:
        violations += error.violations
    if not is_planned(config):
        violations += _device_violations(config, machine, ranks)
        violations += _compiler_violations(config, machine)
    if valid is not None and not is_planned(config):
        violations += _memory_violations(valid, machine, ranks)
    violations += _file_violations(config)
    return valid, violations


def torchao_violations(config: Config, problem: str | None) -> list[str]:
    """Name the key that needs torchao, where torchao cannot be used.

    Args:
        config: Not necessarily valid.
        problem: Why torchao cannot be used; None where it can.

    Returns:
        At most one violation.
    """
    if problem is None:
        return []
    if config.precision.attention == "quantized":
        return [f"precision.attention=quantized: {problem}."]
    return [f"precision.mode=mxfp8_emulated: {problem}."] if config.precision.mode == EMULATED else []


def describe(config: Config | None, machine: Machine) -> str | None:
    """Return the sizes and the memory estimate of a valid configuration; None for an invalid one."""
    if config is None:
        return None
    memory = target_memory(config.hardware.target)
    if uses_gpu(config, machine):
        smallest = min(machine.gpus, key=lambda gpu: gpu.memory_bytes)
        memory = Memory(smallest.memory_bytes, f"one {smallest.name}", smallest.capability)
    return f"{describe_sizes(config)}\n{describe_memory(config, memory)}"


def _needs_gpu(config: Config) -> str | None:
    """The key that needs a GPU, with its value; None where a CPU will do."""
    mode = config.precision.mode
    if mode == AUTO8 or MODES[mode].least is not None:
        return f"precision.mode={mode}"
    return "experts.backend=te" if config.experts.backend == "te" else None


def _device_violations(config: Config, machine: Machine, ranks: int) -> Iterator[str]:
    if config.device == "cpu" or config.hardware.target != AUTO:
        return  # `validate` knows the device, and has checked the mode against it
    try:
        resolve_mode(config.precision.mode, machine.capability, machine.device_name)
    except ConfigError as error:
        yield from error.violations
    if (key := _needs_gpu(config)) and not machine.gpus and config.device == AUTO:
        yield (
            f"device=auto: {key} needs a GPU for each of the {ranks} ranks, and this host has 0 GPUs. "
            f"Run it on a host with {ranks}, or set hardware.target and train.dry_run=true to check it for another."
        )


def _compiler_violations(config: Config, machine: Machine) -> Iterator[str]:
    if not uses_gpu(config, machine) and not config.train.compile:
        return
    reason = "train.compile=true compiles kernels" if config.train.compile else "device: kernels on GPUs are compiled"
    if machine.host_compiler is None:
        yield f"{reason} at run time, and no C compiler (cc, gcc or clang) is on the PATH. Install one."
    if not machine.python_headers:
        yield f"{reason} at run time against Python.h, which is missing. Install Python's development headers."


def _memory_violations(config: Config, machine: Machine, ranks: int) -> Iterator[str]:
    state = state_bytes_per_rank(config)
    parallel = config.parallel
    layout = f"parallel.dp·ep·tp = {parallel.dp}·{parallel.ep}·{parallel.tp}"
    keeps = f"{layout}: each rank keeps {_gib(state)} of weights, gradients and optimizer"
    remedy = "Start more ranks, or make the model smaller."
    if uses_gpu(config, machine):
        memory = machine.gpus[0].memory_bytes
        if state > memory:
            yield f"{keeps}, and {machine.gpus[0].name} has {_gib(memory)}. {remedy}"
    elif _needs_gpu(config) is None and state * ranks > machine.memory_bytes:
        yield f"{keeps}, {_gib(state * ranks)} together, and this host has {_gib(machine.memory_bytes)}. {remedy}"


def _file_violations(config: Config) -> Iterator[str]:
    if config.data.path is None:
        try:
            demo_path()
        except DependencyError as error:
            yield str(error)
    else:
        try:
            for name in files_of(config.data.path):
                yield from _unreadable("data.path", name, "Give a FASTA file, or the prefix of token files.")
        except ConfigError as error:
            yield from error.violations
    resume, init_from = config.checkpoint.resume, config.checkpoint.init_from
    if resume not in (AUTO, "never"):
        yield from _unreadable("checkpoint.resume", resume, "Give a step folder, auto or never.")
    if init_from is not None:
        yield from _unreadable("checkpoint.init_from", init_from, "Give a step folder.")
    folders = {"run.dir": run_dir(config), "checkpoint.ckpt_dir": checkpoint_dir(config)}
    for key, folder in folders.items():
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            yield f"{key}: cannot write {folder} ({existing} is no writable folder). Set {key} to one."


def _unreadable(key: str, value: str, remedy: str) -> Iterator[str]:
    path = Path(value)
    if not path.exists():
        yield f"{key}={value}: no such file or folder. {remedy}"
    elif not os.access(path, os.R_OK):
        yield f"{key}={value} cannot be read by this user. {remedy}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
