"""The arguments of `scaling`, and its run."""

import argparse
from pathlib import Path

from tools.benchmarks.commands.common import Subcommands, add_common, add_markdown, write_outputs
from tools.benchmarks.commands.train_step import CONFIG_DIR, PEERS
from tools.command_line import positive


def add(commands: Subcommands) -> None:
    """Add the subcommand."""
    text = "weak scaling: a training step with the same work per rank at several numbers of ranks"
    command = commands.add_parser(
        "scaling",
        help=text,
        description=text,
        usage="benchmark.py scaling --config-name NAME --ranks 1 2 4 8 [options] [key=value ...]\n"
        "       benchmark.py scaling --from FILE FILE ... [options]",
        epilog="key=value changes the configuration at every size. --from puts files of train-step --json together, "
        "for sizes that need several hosts.",
    )
    command.set_defaults(run=run, overrides=[])
    add_common(command, repetitions=8)
    add_markdown(command)
    command.add_argument(
        "--config-name", default="L2_weak_scaling", help="a configuration, of configs/ or --config-dir (%(default)s)"
    )
    command.add_argument("--config-dir", type=Path, help="a second folder of configurations")
    command.add_argument("--ranks", nargs="+", type=positive, metavar="N", default=[1, 2], help="(default: 1 2)")
    command.add_argument("--from", nargs="+", type=Path, metavar="FILE", dest="files", help="results of train-step")
    command.add_argument(
        "--grow",
        choices=("ep", "dp"),
        default="ep",
        help="what the ranks are for: experts, as many on each, or data (default: %(default)s)",
    )
    command.add_argument(
        "--experts-per-rank", type=positive, default=8, help="with --grow ep, of each layer (default: %(default)s)"
    )
    command.add_argument("--peers", nargs="*", choices=PEERS, default=[], help="measured at every size, too")
    command.add_argument(
        "--ours", nargs="*", metavar="MODE", help="precision modes (default: the configuration's precision.mode)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `scaling`: print the report, write the files that were asked for.

    Returns:
        The exit code.

    Raises:
        ConfigError: A configuration that is not valid at some size, or a device, file or folder that is missing.
        DependencyError: A chart is wanted and matplotlib is missing.
    """
    # torch takes seconds to import: --help and mistyped options shall not wait for it.
    from tools.benchmarks import report as common_report
    from tools.benchmarks.scaling import report, sizes
    from tools.benchmarks.scaling import run as scaling

    common_report.check_outputs(arguments.json, arguments.chart)
    if arguments.files:
        write_outputs(arguments, scaling.from_files(arguments.files), report)
        return 0
    growth = sizes.Growth(arguments.grow, arguments.experts_per_rank)
    options = sizes.plan(
        arguments.config_name,
        arguments.overrides,
        (CONFIG_DIR, arguments.config_dir),
        arguments.ranks,
        growth,
        device=arguments.device,
        peers=arguments.peers,
        ours=arguments.ours,
        compile_model=None,
        peer_clipping=False,
        breakdown=True,
        warmup=arguments.warmup,
        repetitions=arguments.repetitions,
        seed=arguments.seed,
        partial_file=None,
    )

    def keep(found: scaling.Scaling) -> None:
        if arguments.json is not None:
            report.write_json(found, arguments.json)

    write_outputs(arguments, scaling.measure(options, growth.sentence(), keep), report)
    return 0
