"""Measure the framework's parts against their alternatives on this machine.

python tools/benchmark.py expert-block --device cpu
python tools/benchmark.py train-step --config-name L0_sanity --nproc 2
python tools/benchmark.py collectives --nproc 2
python tools/benchmark.py saves --nproc 2
python tools/benchmark.py scaling --config-name L0_sanity --ranks 1 2
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


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
    from tools.command_line import show_error

    arguments = parse(argv)
    try:
        return arguments.run(arguments)
    except MoeFrameworkError as error:
        return show_error(error)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `key=value` may stand anywhere among the options of a benchmark that takes a config.

    Raises:
        SystemExit: It cannot be parsed, or asks for help.
    """
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    takes_overrides = hasattr(arguments, "overrides")
    unknown = [text for text in rest if not takes_overrides or text.startswith("-") or "=" not in text]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_overrides:
        arguments.overrides = rest
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; each subcommand sets `run`, which takes the parsed arguments and returns the exit code."""
    from tools.benchmarks.commands import collectives, expert_block, saves, scaling, train_step

    parser = argparse.ArgumentParser(prog="benchmark.py", description="Measure parts of the framework.")
    commands = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    expert_block.add(commands)
    train_step.add(commands)
    collectives.add(commands)
    saves.add(commands)
    scaling.add(commands)
    return parser


if __name__ == "__main__":
    # Started as a file, Python looks for modules in tools/ and not in the repository's root.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main(sys.argv[1:]))
