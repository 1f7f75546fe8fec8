"""The arguments of `collectives`, and its run."""

import argparse

from tools.benchmarks.commands.common import Subcommands, add_common, add_markdown, write_outputs
from tools.command_line import positive


def add(commands: Subcommands) -> None:
    """Add the subcommand."""
    text = "all-to-all, all-gather, reduce-scatter and all-reduce by size, and our dispatch and combine"
    command = commands.add_parser("collectives", help=text, description=text)
    command.set_defaults(run=run)
    add_common(command)
    add_markdown(command)
    command.add_argument("--nproc", type=positive, default=2, help="ranks; under torchrun its own (default: 2)")
    command.add_argument(
        "--megabytes", type=positive, nargs="+", help="per rank (default: 1 16 128 256 on cuda, 1 on cpu)"
    )
    command.add_argument("--tokens", type=positive, help="tokens T per rank (default: 16384 on cuda, 512 on cpu)")
    command.add_argument("--hidden-size", type=positive, help="model width D (default: 4096 on cuda, 128 on cpu)")
    command.add_argument("--num-experts", type=positive, default=8, help="experts E (default: %(default)s)")
    command.add_argument("--top-k", type=positive, default=2, help="experts per token K (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Run `collectives`: print the report, write the files that were asked for.

    Returns:
        The exit code.

    Raises:
        ConfigError: Sizes that don't fit each other, or a device or folder that is missing.
        DependencyError: A chart is wanted and matplotlib is missing.
    """
    from moe_framework.distributed.runtime import launch_environment
    from moe_framework.errors import ConfigError

    # torch takes seconds to import: --help and mistyped options shall not wait for it.
    from tools.benchmarks import collectives, collectives_report
    from tools.benchmarks import report as common_report

    common_report.check_outputs(arguments.json, arguments.chart)
    launch = launch_environment()
    num_ranks = launch.world_size if launch.launched else arguments.nproc
    if arguments.num_experts % num_ranks or arguments.top_k > arguments.num_experts:
        raise ConfigError(
            f"--num-experts={arguments.num_experts} must be a multiple of the {num_ranks} ranks, and at least "
            f"--top-k={arguments.top_k}. Change --num-experts."
        )
    found = collectives.run(
        collectives.Options(
            device=arguments.device,
            num_ranks=num_ranks,
            megabytes=None if arguments.megabytes is None else tuple(arguments.megabytes),
            tokens=arguments.tokens,
            hidden_size=arguments.hidden_size,
            num_experts=arguments.num_experts,
            top_k=arguments.top_k,
            warmup=arguments.warmup,
            repetitions=arguments.repetitions,
            seed=arguments.seed,
        )
    )
    write_outputs(arguments, found, collectives_report)
    return 0
