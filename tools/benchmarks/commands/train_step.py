"""The arguments of `train-step`, and its run."""

import argparse
from pathlib import Path

from tools.benchmarks.commands.common import Subcommands, add_common, add_markdown, write_outputs
from tools.command_line import positive

PEERS = ("hf_eager", "hf_grouped_mm", "megatron_bf16", "megatron_fp8")
CONFIG_DIR = Path(__file__).resolve().parents[3] / "configs"


def add(commands: Subcommands) -> None:
    """Add the subcommand."""
    text = "a training step of ours against those of Hugging Face and Megatron-Core, on the same tokens"
    command = commands.add_parser(
        "train-step",
        help=text,
        description=text,
        usage="benchmark.py train-step --config-name NAME [options] [key=value ...]",
        epilog="key=value changes the configuration, such as model.num_layers=2 train.micro_batch_size=4.",
    )
    command.set_defaults(run=run, overrides=[])
    add_common(command, repetitions=8)
    add_markdown(command)
    command.add_argument("--config-name", required=True, help="a configuration, of configs/ or of --config-dir")
    command.add_argument("--config-dir", type=Path, help="a second folder of configurations")
    command.add_argument("--nproc", type=positive, default=1, help="ranks; under torchrun its own (default: 1)")
    command.add_argument(
        "--peers",
        nargs="*",
        choices=PEERS,
        default=["hf_eager", "hf_grouped_mm"],
        help="(default: hf_eager hf_grouped_mm)",
    )
    command.add_argument(
        "--ours", nargs="*", metavar="MODE", help="precision modes (default: the configuration's precision.mode)"
    )
    command.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="ours (default: the configuration's train.compile)"
    )
    command.add_argument("--peer-clipping", action="store_true", help="clip Hugging Face's gradients as ours")
    command.add_argument(
        "--published",
        nargs="+",
        type=_named_ratio,
        default=[],
        metavar="NAME=RATIO",
        help="ratios to hf_eager from elsewhere, drawn beside those of this run",
    )
    command.add_argument("--breakdown", action="store_true", help="say where the time of our step goes, by part")


def run(arguments: argparse.Namespace) -> int:
    """Run `train-step`: print the report, write the files that were asked for.

    Returns:
        The exit code.

    Raises:
        ConfigError: A configuration that is not valid, or a device or folder that is missing.
        DependencyError: A chart is wanted and matplotlib is missing.
    """
    # torch takes seconds to import: --help and mistyped options shall not wait for it.
    from tools.benchmarks import report as common_report
    from tools.benchmarks.train_step import options as train_options
    from tools.benchmarks.train_step import report, session

    common_report.check_outputs(arguments.json, arguments.chart)
    options = train_options.resolve(
        config_name=arguments.config_name,
        overrides=arguments.overrides,
        config_dirs=(CONFIG_DIR, arguments.config_dir),
        num_ranks=arguments.nproc,
        device=arguments.device,
        peers=arguments.peers,
        ours=arguments.ours,
        compile_model=arguments.compile,
        peer_clipping=arguments.peer_clipping,
        published=arguments.published,
        breakdown=arguments.breakdown,
        warmup=arguments.warmup,
        repetitions=arguments.repetitions,
        seed=arguments.seed,
        partial_file=arguments.json,
    )
    found = session.run(options)
    write_outputs(arguments, found, report)
    return 0


def _named_ratio(text: str) -> tuple[str, float]:
    name, separator, number = text.rpartition("=")
    try:
        ratio = float(number)
    except ValueError:
        ratio = 0.0
    if not (separator and name and 0 < ratio < float("inf")):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=RATIO, such as 'grouped GEMM, 8 × B200=1.09'")
    return name, ratio
