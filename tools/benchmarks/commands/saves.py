"""The arguments of `saves`, and its run."""

import argparse
from pathlib import Path

from tools.benchmarks.commands.common import Subcommands, add_common, add_markdown, write_outputs
from tools.command_line import positive

CONFIG_DIR = Path(__file__).resolve().parents[3] / "configs"


def add(commands: Subcommands) -> None:
    """Add the subcommand."""
    text = "the stall of a save in the background and in the foreground, and the cost of the heartbeat"
    command = commands.add_parser(
        "saves",
        help=text,
        description=text,
        usage="benchmark.py saves [options] [key=value ...]",
        epilog="key=value changes the configuration, such as model.num_layers=2. Started by ft_launcher instead of "
        "with --nproc, the heartbeat goes to its monitor.",
    )
    command.set_defaults(run=run, overrides=[])
    add_common(command, repetitions=10)
    add_markdown(command)
    command.add_argument("--config-name", default="L0_sanity", help="a configuration (default: %(default)s)")
    command.add_argument("--config-dir", type=Path, help="a second folder of configurations")
    command.add_argument("--nproc", type=positive, default=2, help="ranks; under torchrun its own (default: 2)")
    command.add_argument("--steps", type=positive, default=5, help="steps without a save a repetition (default: 5)")
    command.add_argument("--folder", type=Path, help="where to save (default: the system's temporary files)")


def run(arguments: argparse.Namespace) -> int:
    """Run `saves`: print the report, write the files that were asked for.

    Returns:
        The exit code.

    Raises:
        ConfigError: A configuration that is not valid, or a device or folder that is missing.
        DependencyError: A chart is wanted and matplotlib is missing.
    """
    from moe_framework.errors import ConfigError

    # torch takes seconds to import: --help and mistyped options shall not wait for it.
    from tools.benchmarks import report as common_report
    from tools.benchmarks import saves, saves_report
    from tools.benchmarks.saves_options import Options, resolve

    common_report.check_outputs(arguments.json, arguments.chart)
    if arguments.folder is not None and not arguments.folder.is_dir():
        raise ConfigError(f"--folder={arguments.folder} does not exist. Create it, or choose another.")
    directories = (CONFIG_DIR, arguments.config_dir)
    config, num_ranks = resolve(
        arguments.config_name, arguments.overrides, directories, arguments.nproc, arguments.device
    )
    found = saves.run(
        Options(
            config_name=arguments.config_name,
            config=config,
            device=arguments.device,
            num_ranks=num_ranks,
            folder=arguments.folder,
            steps=arguments.steps,
            warmup=arguments.warmup,
            repetitions=arguments.repetitions,
            seed=arguments.seed,
        )
    )
    write_outputs(arguments, found, saves_report)
    return 0
