"""What `saves` shall measure, checked before any rank starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_framework.config.load import load_config
from moe_framework.config.schema import Config
from moe_framework.config.validate import validate
from moe_framework.distributed.runtime import launch_environment


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        config_name: Of the configuration.
        config: Valid for `num_ranks`.
        device: `auto`, `cpu` or `cuda`.
        num_ranks: Ranks.
        folder: Where to save; None for the system's folder of temporary files.
        steps: Training steps without a save in each repetition.
        warmup: Repetitions that are not kept.
        repetitions: Repetitions that are.
        seed: Of the tokens.
    """

    config_name: str
    config: Config
    device: str
    num_ranks: int
    folder: Path | None
    steps: int
    warmup: int
    repetitions: int
    seed: int


def resolve(
    config_name: str, overrides: Sequence[str], config_dirs: tuple[Path, Path | None], num_ranks: int, device: str
) -> tuple[Config, int]:
    """Compose and check the configuration.

    Args:
        config_name: Of the configuration.
        overrides: `key=value` each.
        config_dirs: The project's folder, and the user's.
        num_ranks: From `--nproc`; under a launcher its number of ranks counts.
        device: `auto`, `cpu` or `cuda`.

    Returns:
        The configuration, and the number of ranks.

    Raises:
        ConfigError: Every violation.
    """
    launch = launch_environment()
    world_size = launch.world_size if launch.launched else num_ranks
    local_world_size = launch.local_world_size if launch.launched else world_size
    config = replace(load_config(config_name, overrides, *config_dirs), device=device)  # pyright: ignore
    return validate(config, world_size=world_size, local_world_size=local_world_size), world_size
