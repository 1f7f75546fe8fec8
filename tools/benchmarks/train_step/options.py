"""What `train-step` shall measure, checked before any rank starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_framework.config.load import load_config
from moe_framework.config.schema import Config
from moe_framework.config.validate import validate
from moe_framework.distributed.runtime import launch_environment
from moe_framework.errors import ConfigError
from moe_framework.precision.modes import AUTO8, MODES

# What published ratios are relative to.
BASE = "hf_eager"


@dataclass(frozen=True)
class Options:
    """The measurement.

    Attributes:
        config_name: Of the configuration.
        overrides: Its changes.
        config: Valid for `num_ranks`, one micro-batch a step, with the first of our precision modes.
        num_ranks: Ranks.
        device: `auto`, `cpu` or `cuda`.
        peers: Names of peers.
        ours: Precision modes of ours.
        peer_clipping: Whether Hugging Face's gradients are clipped.
        published: Names and ratios to `hf_eager` from elsewhere, for the report alone.
        breakdown: Whether our steps are profiled by part.
        warmup: Steps that are not kept.
        repetitions: Steps that are.
        seed: Of the tokens; the weights follow train.seed.
        partial_file: Written after each contender with what there is, so that a run that dies leaves its rows.
    """

    config_name: str
    overrides: tuple[str, ...]
    config: Config
    num_ranks: int
    device: str
    peers: tuple[str, ...]
    ours: tuple[str, ...]
    peer_clipping: bool
    published: tuple[tuple[str, float], ...]
    breakdown: bool
    warmup: int
    repetitions: int
    seed: int
    partial_file: Path | None

    @property
    def contenders(self) -> tuple[str, ...]:
        """The order of the run: peers first, then ours; of peers, `ours:MODE` distinguishes ours."""
        return (*self.peers, *(f"ours:{mode}" for mode in self.ours))

    def config_for(self, mode: str) -> Config:
        """Return the configuration with another precision mode."""
        return replace(self.config, precision=replace(self.config.precision, mode=mode))  # pyright: ignore


def resolve(
    *,
    config_name: str,
    overrides: Sequence[str],
    config_dirs: tuple[Path, Path | None],
    num_ranks: int,
    device: str,
    peers: Sequence[str],
    ours: Sequence[str] | None,
    compile_model: bool | None,
    peer_clipping: bool,
    breakdown: bool,
    warmup: int,
    repetitions: int,
    seed: int,
    partial_file: Path | None,
    published: Sequence[tuple[str, float]] = (),
) -> Options:
    """Compose and check the configuration once per precision mode.

    Args:
        config_name: Of the configuration.
        overrides: `key=value` each.
        config_dirs: The project's folder, and the user's.
        num_ranks: From `--nproc`; under torchrun its number of ranks counts.
        device: `auto`, `cpu` or `cuda`.
        peers: Names of peers.
        ours: Precision modes; None for the configuration's.
        compile_model: Beats `train.compile`, unless None.
        peer_clipping: See `Options`.
        breakdown: See `Options`.
        warmup: See `Options`.
        repetitions: See `Options`.
        seed: See `Options`.
        partial_file: See `Options`.
        published: See `Options`.

    Returns:
        The measurement.

    Raises:
        ConfigError: Every violation.
    """
    launch = launch_environment()
    world_size = launch.world_size if launch.launched else num_ranks
    config = load_config(config_name, overrides, *config_dirs)
    modes = tuple(ours) if ours is not None else (config.precision.mode,)
    _check_contenders(peers, modes, published)
    if compile_model is not None:
        config = replace(config, train=replace(config.train, compile=compile_model))
    config = replace(_one_micro_batch(config, world_size), device=device)  # pyright: ignore
    local_world_size = launch.local_world_size if launch.launched else world_size
    valid = [_valid(config, mode, world_size, local_world_size) for mode in modes or (config.precision.mode,)]
    return Options(
        config_name=config_name,
        overrides=tuple(overrides),
        config=valid[0],
        num_ranks=world_size,
        device=device,
        peers=tuple(peers),
        ours=modes,
        peer_clipping=peer_clipping,
        published=tuple(published),
        breakdown=breakdown,
        warmup=warmup,
        repetitions=repetitions,
        seed=seed,
        partial_file=partial_file,
    )


def _check_contenders(peers: Sequence[str], modes: Sequence[str], published: Sequence[tuple[str, float]]) -> None:
    if not modes and not peers:
        raise ConfigError("--peers and --ours are both empty. Name at least one contender.")
    if published and BASE not in peers:
        raise ConfigError(f"--published has ratios to {BASE}, which must run beside them. Add it to --peers.")
    if unknown := [mode for mode in modes if mode not in (*MODES, AUTO8)]:
        raise ConfigError([f"--ours={mode} must be one of {', '.join((*MODES, AUTO8))}." for mode in unknown])


def _valid(config: Config, mode: str, world_size: int, local_world_size: int) -> Config:
    with_mode = replace(config, precision=replace(config.precision, mode=mode))  # pyright: ignore
    return validate(with_mode, world_size=world_size, local_world_size=local_world_size)


def _one_micro_batch(config: Config, world_size: int) -> Config:
    """No accumulation: a peer's step is one micro-batch, too; also a run of so few steps that no warm-up fits."""
    train, tp = config.train, max(config.parallel.tp, 1)
    rows = train.micro_batch_size * max(world_size // tp, 1)
    return replace(config, train=replace(train, global_batch_size=rows))
