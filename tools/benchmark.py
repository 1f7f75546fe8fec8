"""Measure the framework's parts against their alternatives on this machine.

python tools/benchmark.py expert-block --device cpu
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

USER_ERROR_EXIT_CODE = 2


def main(argv: Sequence[str]) -> int:
    """Run one benchmark.

    Args:
        argv: The arguments after the program's name.

    Returns:
        The exit code: 0, or 2 for an error that the user can correct.

    Raises:
        SystemExit: The command line cannot be parsed, or asks for help.
    """
    from moe_framework.errors import MoeFrameworkError

    arguments = build_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except MoeFrameworkError as error:
        for line in str(error).splitlines():
            print(f"{type(error).__name__}: {line}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; each subcommand sets `run`, which takes the parsed arguments and returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmark.py", description="Measure parts of the framework.")
    commands = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    _add_expert_block(commands)
    return parser


def _add_expert_block(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "grouped_mm against loop; all-to-all dispatch against all-gather"
    command = commands.add_parser("expert-block", help=text, description=text)
    command.set_defaults(run=run_expert_block)
    _add_common(command)
    command.add_argument(
        "--tokens",
        type=positive,
        default=2048,
        help="tokens T, of each rank in the dispatch part (default: %(default)s)",
    )
    command.add_argument("--hidden-size", type=positive, default=256, help="model width D (default: %(default)s)")
    command.add_argument(
        "--intermediate-size", type=positive, default=512, help="expert width F (default: %(default)s)"
    )
    command.add_argument("--top-k", type=positive, default=2, help="experts per token K (default: %(default)s)")
    command.add_argument(
        "--num-experts",
        type=positive,
        nargs="+",
        default=[8, 64],
        help="experts E; dispatch takes the first (default: 8 64)",
    )
    command.add_argument("--ep", type=positive, nargs="+", help="ranks of dispatch (default: 2 4, or all GPUs)")
    command.add_argument(
        "--dtype", choices=("fp32", "bf16"), nargs="+", help="dtypes (default: fp32 bf16 on cpu, bf16 on cuda)"
    )


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="what to measure (default: %(default)s)"
    )
    command.add_argument("--repetitions", type=positive, default=20, help="kept repetitions (default: %(default)s)")
    command.add_argument("--warmup", type=positive, default=3, help="repetitions before them (default: %(default)s)")
    command.add_argument("--threads", type=positive, help="torch's threads outside dispatch (default: torch's choice)")
    command.add_argument("--seed", type=int, default=0, help="of all random numbers (default: %(default)s)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    command.add_argument("--chart", type=Path, metavar="FILE.png", help="draw the results; needs matplotlib")


def positive(text: str) -> int:
    """Parse an integer of at least 1.

    Raises:
        ArgumentTypeError: It is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 1")
    return int(text)


def run_expert_block(arguments: argparse.Namespace) -> int:
    """Run `expert-block`: print the report, write the files that were asked for.

    Returns:
        The exit code.

    Raises:
        ConfigError: Sizes that don't fit each other, or a device or folder that is missing.
        DependencyError: A chart is wanted and matplotlib is missing.
    """
    # torch takes seconds to import: --help and mistyped options shall not wait for it.
    from tools.benchmarks import expert_block, report

    report.check_outputs(arguments.json, arguments.chart)
    options = expert_block.Options(
        device=arguments.device,
        tokens=arguments.tokens,
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        top_k=arguments.top_k,
        num_experts=tuple(arguments.num_experts),
        ep=None if arguments.ep is None else tuple(arguments.ep),
        dtypes=None if arguments.dtype is None else tuple(arguments.dtype),
        warmup=arguments.warmup,
        repetitions=arguments.repetitions,
        threads=arguments.threads,
        seed=arguments.seed,
    )
    found = expert_block.run(options)
    print(report.to_markdown(found))
    if arguments.json is not None:
        report.write_json(found, arguments.json)
    if arguments.chart is not None:
        report.write_chart(found, arguments.chart)
    return 0


if __name__ == "__main__":
    # Started as a file, Python looks for modules in tools/ and not in the repository's root.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main(sys.argv[1:]))
