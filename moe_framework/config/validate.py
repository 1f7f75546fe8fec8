"""Check a configuration against the number of ranks, before torch is imported and before any collective.

Pure: the same arguments give the same answer on every rank, so that no rank waits for one that has stopped.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from moe_framework.config import rules
from moe_framework.config.parallel_rules import (
    DEGREES,
    count_ranks,
    degree_violations,
    shard_violations,
    tensor_violations,
)
from moe_framework.config.rules import either, is_sound, near_multiples
from moe_framework.config.schedule_rules import schedule_violations
from moe_framework.config.schema import AUTO, Config
from moe_framework.errors import ConfigError


def validate(
    config: Config, *, world_size: int, local_world_size: int = 1, cuda_device_count: int | None = None
) -> Config:
    """Check every rule between keys and return the configuration with `parallel.dp` as a number.

    Args:
        config: A configuration from `load_config`.
        world_size: Number of ranks; see `planned_world_size` for `hardware.target`.
        local_world_size: Number of ranks on this host.
        cuda_device_count: GPUs that this process sees, or None while that is not known.

    Returns:
        The configuration with `parallel.dp: auto` resolved.

    Raises:
        ConfigError: Every violation at once.
    """
    dp = _resolve_dp(config, world_size)
    violations = list(
        chain(
            rules.range_violations(config),
            rules.run_violations(config),
            degree_violations(config, world_size, dp),
            rules.model_violations(config),
            rules.backend_violations(config),
            tensor_violations(config),
            shard_violations(config, dp, world_size),
            rules.data_violations(config),
            schedule_violations(config),
            _batch_violations(config, dp),
            rules.checkpoint_violations(config),
            rules.hardware_violations(config),
            _device_violations(config, local_world_size, cuda_device_count),
        )
    )
    if violations:
        raise ConfigError(violations)
    assert dp is not None, "a dp that cannot be resolved is a violation"
    return replace(config, parallel=replace(config.parallel, dp=dp))


def is_planned(config: Config) -> bool:
    """Return whether the configuration is for another machine, whose ranks are not started here."""
    return config.hardware.target != AUTO and config.train.dry_run


def planned_world_size(config: Config) -> int:
    """Return the number of ranks that the degrees ask for, with `parallel.dp: auto` taken as 1."""
    parallel = config.parallel
    return (1 if parallel.dp == AUTO else parallel.dp) * parallel.ep * parallel.tp


def _resolve_dp(config: Config, world_size: int) -> int | None:
    """Return dp, or None where the degrees do not fit the world."""
    parallel = config.parallel
    if not is_sound(config, *DEGREES):
        return None
    per_replica = parallel.ep * parallel.tp
    if world_size % per_replica:
        return None
    dp = world_size // per_replica
    return dp if parallel.dp in (AUTO, dp) else None


def _batch_violations(config: Config, dp: int | None) -> Iterator[str]:
    train, ep = config.train, config.parallel.ep
    if dp is None or not is_sound(config, "train.global_batch_size", "train.micro_batch_size"):
        return
    unit = train.micro_batch_size * dp * ep
    if train.global_batch_size % unit:
        yield (
            f"train.global_batch_size={train.global_batch_size} must be a multiple of "
            f"train.micro_batch_size·parallel.dp·ep = {train.micro_batch_size}·{dp}·{ep} = {unit}, so that "
            f"accumulation is whole. Use {either(near_multiples(train.global_batch_size, unit))}, "
            f"or another train.micro_batch_size."
        )


def _device_violations(config: Config, local_world_size: int, cuda_device_count: int | None) -> Iterator[str]:
    if cuda_device_count is None or is_planned(config) or config.device == "cpu":
        return
    if cuda_device_count == 0 and config.device == "cuda":
        yield "device=cuda, but no CUDA device is visible. Use device=cpu or auto."
    elif 0 < cuda_device_count < local_world_size:
        yield (
            f"device={config.device}: this host shows {cuda_device_count} CUDA devices for "
            f"{count_ranks(local_world_size)}. "
            f"Start at most {cuda_device_count} a host, or set device=cpu."
        )
