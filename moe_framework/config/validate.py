"""Check a configuration against the number of ranks, before torch is imported and before any collective.

Pure: the same arguments give the same answer on every rank, so that no rank waits for one that has stopped.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from math import gcd

from moe_framework.config import rules
from moe_framework.config.rules import divisors, either, is_sound, near, near_multiples
from moe_framework.config.schema import AUTO, Config
from moe_framework.errors import ConfigError

_DEGREES = ("parallel.dp", "parallel.ep", "parallel.tp")


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
            _degree_violations(config, world_size, dp),
            rules.model_violations(config),
            rules.backend_violations(config),
            _shard_violations(config, dp, world_size),
            rules.data_violations(config),
            rules.schedule_violations(config),
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
    if not is_sound(config, *_DEGREES):
        return None
    per_replica = parallel.ep * parallel.tp
    if world_size % per_replica:
        return None
    dp = world_size // per_replica
    return dp if parallel.dp in (AUTO, dp) else None


def _degree_violations(config: Config, world_size: int, dp: int | None) -> Iterator[str]:
    parallel, num_experts = config.parallel, config.model.num_experts
    if is_sound(config, *_DEGREES) and dp is None:
        yield _world_violation(config, world_size)
    if parallel.ep >= 1 and num_experts >= 1 and num_experts % parallel.ep:
        yield (
            f"parallel.ep={parallel.ep} must divide model.num_experts={num_experts}. "
            f"Use {either(divisors(num_experts))}."
        )
    if parallel.tp > 1:
        yield f"parallel.tp={parallel.tp}: tensor parallelism is not implemented in this version. Set parallel.tp=1."
    if parallel.dp_replicate > 1:
        yield (
            f"parallel.dp_replicate={parallel.dp_replicate}: model replicas (HSDP) are not implemented in this "
            f"version. Set parallel.dp_replicate=1."
        )
    if parallel.tp >= 1 and parallel.expert_tp > 1 and parallel.expert_tp != parallel.tp:
        allowed = either(sorted({1, parallel.tp}))
        yield f"parallel.expert_tp={parallel.expert_tp} must be 1 or parallel.tp={parallel.tp}. Use {allowed}."


def _world_violation(config: Config, world_size: int) -> str:
    parallel = config.parallel
    per_replica = parallel.ep * parallel.tp
    has = f"the world has {_count(world_size)}"
    fits = world_size % per_replica == 0
    if parallel.dp == AUTO:
        choices = divisors(gcd(world_size, max(config.model.num_experts, 1)))
        return (
            f"parallel.ep·tp = {parallel.ep}·{parallel.tp} = {per_replica} must divide the number of ranks, but {has}. "
            f"Set parallel.ep={either(choices)}, or start {_count(per_replica)} or a multiple of it."
        )
    product = parallel.dp * per_replica
    start = f"start {_count(product)}."
    remedy = f"Set parallel.dp={world_size // per_replica}, or {start}" if fits else start.capitalize()
    return f"parallel.dp·ep·tp = {parallel.dp}·{parallel.ep}·{parallel.tp} = {product}, but {has}. {remedy}"


def _shard_violations(config: Config, dp: int | None, world_size: int) -> Iterator[str]:
    """FSDP splits dim 1 of the experts' weights, [E, 2F, D] and [E, D, F], and refuses uneven shards."""
    replicas, model = config.parallel.dp_replicate, config.model
    if dp is None or replicas < 1 or dp % replicas:
        return
    if not is_sound(config, "model.hidden_size", "model.intermediate_size"):
        return
    shards, width, gate_up = dp // replicas, model.hidden_size, 2 * model.intermediate_size
    if width % shards == 0 and gate_up % shards == 0:
        return
    origin = f" (auto, of {_count(world_size)})" if config.parallel.dp == AUTO else ""
    yield (
        f"parallel.dp={dp}{origin} must divide model.hidden_size={width} and 2·model.intermediate_size={gate_up}, "
        f"because the experts' weights are split evenly. Use dp {either(near(shards, divisors(gcd(width, gate_up))))}."
    )


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
            f"device={config.device}: this host shows {cuda_device_count} CUDA devices for {_count(local_world_size)}. "
            f"Start at most {cuda_device_count} a host, or set device=cpu."
        )


def _count(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"
