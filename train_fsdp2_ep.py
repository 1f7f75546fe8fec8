"""Train a Mixture-of-Experts model: compose the configuration, validate it, train.

torchrun --nproc_per_node=2 train_fsdp2_ep.py --config-name L0_sanity
"""

import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from moe_framework.config.command_line import CommandLine
from moe_framework.config.load import help_for, load_config, parse_command_line, to_yaml
from moe_framework.config.schema import Config
from moe_framework.config.validate import is_planned, planned_world_size, validate
from moe_framework.distributed.runtime import LaunchEnvironment, launch_environment
from moe_framework.errors import ConfigError, ExitCode, MoeFrameworkError
from moe_framework.train.dry_run import describe_sizes
from moe_framework.train.memory import describe_memory, memory_here

CONFIG_DIR = Path(__file__).resolve().parent / "configs"

# torchrun ends all ranks as soon as one has ended, so the silent ones give rank 0 this long to print, in seconds.
SILENT_EXIT_DELAY_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: The arguments after the program's name.

    Returns:
        The exit code; see `ExitCode`.

    Collective: the world, once the configuration is valid; every rank must call.
    """
    # Said by torch on every rank, about a package that nvidia-resiliency-ext 0.4 brings.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
    launch, started = LaunchEnvironment(), False
    try:
        launch = launch_environment()
        command_line = parse_command_line(argv)
        if command_line.show:
            if launch.rank == 0:
                print(shown(command_line), flush=True)
            return ExitCode.DONE
        config = load_valid_config(command_line, launch)
        if config.train.dry_run:
            if launch.rank == 0:
                memory = describe_memory(config, memory_here(config))
                print(f"{to_yaml(config)}\n{describe_sizes(config)}\n{memory}", flush=True)
            return ExitCode.DONE
        # torch takes seconds to import, so it comes after everything that can be wrong with the configuration.
        from moe_framework.train.run import run

        started = True
        return run(config)
    except MoeFrameworkError as error:
        # Until the ranks are started they know the same, and find the same.
        error.said_elsewhere |= not started and launch.rank != 0
        report(error, launch.rank)
        return ExitCode.USER_ERROR


def load_valid_config(command_line: CommandLine, launch: LaunchEnvironment) -> Config:
    """Compose the configuration and check it against the ranks that were started.

    Raises:
        ConfigError: Every violation, the same on every rank.
    """
    config = load_config(command_line.config_name, command_line.overrides, CONFIG_DIR, command_line.config_dir)
    world_size = planned_world_size(config) if is_planned(config) else launch.world_size
    return validate(config, world_size=world_size, local_world_size=launch.local_world_size)


def shown(command_line: CommandLine) -> str:
    """Return the help text or the resolved configuration, which need not fit this machine.

    Raises:
        ConfigError: The configuration cannot be composed.
    """
    if command_line.show == "help":
        return help_for(CONFIG_DIR, command_line.config_dir)
    config = load_config(command_line.config_name, command_line.overrides, CONFIG_DIR, command_line.config_dir)
    return to_yaml(config).rstrip()


def report(error: MoeFrameworkError, rank: int) -> None:
    """Print an error without a traceback, one line per violation, unless another rank does."""
    if error.said_elsewhere:
        time.sleep(SILENT_EXIT_DELAY_S)
        return
    lines = error.violations if isinstance(error, ConfigError) else [str(error)]
    where = f"[rank {rank}] " if rank else ""
    for line in lines:
        print(f"{where}{type(error).__name__}: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
