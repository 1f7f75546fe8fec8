"""Compares configurations: those of the ranks with each other, and that of a start with the one it goes on from."""

import hashlib
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from moe_framework.config.load import to_dict, to_yaml
from moe_framework.config.schema import Config
from moe_framework.errors import ConfigError
from moe_framework.optim.schedule import learning_rate

logger = logging.getLogger(__name__)

_MOST_RANKS = 8


def digest(config: Config) -> str:
    """Return the SHA-256 of a configuration, in hexadecimal."""
    return hashlib.sha256(to_yaml(config).encode()).hexdigest()


def check_same_on_all_ranks(config: Config, group: dist.ProcessGroup) -> None:
    """Stop where ranks were started with different configurations: they would train something else, or hang.

    Args:
        config: This rank's, validated.
        group: All ranks, through gloo.

    Raises:
        ConfigError: They differ; on every rank, with the ranks and the first key that differs.

    Collective: `group`; every rank must call.
    """
    digests = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest(config), group=group)
    others = [rank for rank, one in enumerate(digests) if one != digests[0]]
    if not others:
        return
    configs: list[Any] = [None] * len(digests)
    dist.all_gather_object(configs, to_dict(config), group=group)
    first, other = configs[0], configs[others[0]]
    changed = _differences(flat(first), flat(other))
    key, (ours, theirs) = next(iter(changed.items()))
    number = f" ({len(changed)} keys differ)" if len(changed) > 1 else ""
    raise ConfigError(
        f"{key}={ours} on rank 0, but {theirs} on rank {others[0]}{number}: every rank must have the same "
        f"configuration. Not rank 0's: {_named(others)}. Start all ranks with the same arguments, and write out what "
        "is computed at the start, such as the time of ${now:...}."
    )


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their dotted keys, such as `optim.lr`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def changes(saved: Mapping[str, Any], config: Config) -> dict[str, list[Any]]:
    """Compare a saved configuration with the current one.

    Args:
        saved: As `to_dict` gave it; what it lacks, because it is older than the key, counts as the default.
        config: The current one.

    Returns:
        Old and new value by dotted key, where they differ.
    """
    before = flat(to_dict(Config())) | flat(saved)
    return {key: list(pair) for key, pair in _differences(before, flat(to_dict(config))).items()}


def log_changes(changed: Mapping[str, list[Any]], config: Config, steps_done: int) -> None:
    """Say what is not as it was saved, and warn where the learning rate is not what it would have been.

    Args:
        changed: From `changes`.
        config: The current configuration.
        steps_done: Where the run goes on.
    """
    for key, (old, new) in changed.items():
        logger.info("changed since the checkpoint was saved: %s: %s -> %s", key, old, new)
    now = flat(to_dict(config))
    old_rate, new_rate = (
        _rate(now | {key: old for key, (old, _) in changed.items()}, steps_done),
        _rate(now, steps_done),
    )
    if steps_done < config.train.max_steps and not math.isclose(old_rate, new_rate, rel_tol=1e-9):
        keys = [key for key in changed if key.startswith("optim.") or key == "train.max_steps"]
        logger.warning(
            "THE LEARNING RATE JUMPS: step %d has %.4g, and %.4g with the saved configuration (%s)",
            steps_done + 1,
            new_rate,
            old_rate,
            ", ".join(f"{key}: {changed[key][0]} -> {changed[key][1]}" for key in keys),
        )


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (one.get(key), value) for key, value in other.items() if key not in one or one[key] != value}


def _rate(settings: Mapping[str, Any], steps_done: int) -> float:
    names = ("lr", "min_lr", "warmup_steps", "schedule", "decay_steps")
    return learning_rate(
        steps_done, max_steps=settings["train.max_steps"], **{name: settings[f"optim.{name}"] for name in names}
    )


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = len(ranks) - _MOST_RANKS
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}" + (f" and {more} more" if more > 0 else "")
