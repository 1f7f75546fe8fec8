"""The numbers of ranks to measure, and what grows with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_framework.config.load import load_config
from moe_framework.distributed.runtime import launch_environment
from moe_framework.errors import ConfigError
from tools.benchmarks.train_step.options import Options, resolve

EP, DP = "ep", "dp"
AXES = (EP, DP)


@dataclass(frozen=True)
class Growth:
    """What a larger number of ranks means.

    Attributes:
        axis: `ep`: expert parallelism over all ranks, each with as many experts as `experts_per_rank`. `dp`: the
            model and its other degrees stay, and data parallelism takes the rest.
        experts_per_rank: With `ep`.
    """

    axis: str
    experts_per_rank: int

    def overrides(self, num_ranks: int) -> list[str]:
        """Return the changes of the configuration at a number of ranks."""
        if self.axis == DP:
            return []
        return [f"parallel.ep={num_ranks}", f"model.num_experts={self.experts_per_rank * num_ranks}"]

    def sentence(self) -> str:
        """Return what grows, for a report."""
        if self.axis == DP:
            return "the model stays, data parallelism grows"
        return f"{self.experts_per_rank} experts per rank, expert parallelism over all ranks"


def plan(
    config_name: str,
    overrides: Sequence[str],
    config_dirs: tuple[Path, Path | None],
    ranks: Sequence[int],
    growth: Growth,
    **options: Any,
) -> list[Options]:
    """Check the configuration at every number of ranks, before any of them starts.

    Args:
        config_name: Of the configuration.
        overrides: `key=value` each.
        config_dirs: The project's folder, and the user's.
        ranks: Numbers of ranks, the smallest first.
        growth: What grows with them.
        options: The others of `train_step.options.resolve`.

    Returns:
        A measurement of `train-step` for each.

    Raises:
        ConfigError: Numbers that do not rise, a launcher that has fixed the number of ranks, or any rule that the
            configuration breaks at one of them.
    """
    if launch_environment().launched:
        raise ConfigError(
            "scaling starts the ranks of every size itself, so no launcher may have started it. On several hosts, run "
            "train-step with --json once for each size, and give the files to scaling --from."
        )
    if list(ranks) != sorted(set(ranks)) or len(ranks) < 2:
        raise ConfigError(
            f"--ranks={' '.join(map(str, ranks))} must be two or more numbers, rising. Such as --ranks 1 2 4 8."
        )
    if growth.axis == EP:
        _check_free(config_name, overrides, config_dirs)
    return [
        resolve(
            config_name=config_name,
            overrides=[*overrides, *growth.overrides(num_ranks)],
            config_dirs=config_dirs,
            num_ranks=num_ranks,
            **options,
        )
        for num_ranks in ranks
    ]


def _check_free(config_name: str, overrides: Sequence[str], config_dirs: tuple[Path, Path | None]) -> None:
    """Refuse values that would be overwritten, and degrees that leave no ranks for the experts."""
    taken = [text for text in overrides if text.split("=")[0].lstrip("+") in ("parallel.ep", "model.num_experts")]
    if taken:
        raise ConfigError(
            [f"{text}: with --grow ep it follows from --ranks. Use --experts-per-rank, or --grow dp." for text in taken]
        )
    parallel = load_config(config_name, overrides, *config_dirs).parallel
    used = [f"parallel.{name}={value}" for name in ("dp_replicate", "tp") if (value := getattr(parallel, name)) > 1]
    if used:
        raise ConfigError([f"{text}: with --grow ep all ranks are expert-parallel. Use --grow dp." for text in used])
