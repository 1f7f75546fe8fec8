"""What the subcommands share: common options, and writing what was found. Free of torch."""

import argparse
from collections.abc import Callable
from pathlib import Path

from tools.command_line import positive

Subcommands = argparse._SubParsersAction


def add_common(command: argparse.ArgumentParser, *, repetitions: int = 20) -> None:
    """Add the options that every benchmark has."""
    command.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="what to measure (default: %(default)s)"
    )
    command.add_argument(
        "--repetitions", type=positive, default=repetitions, help="kept repetitions (default: %(default)s)"
    )
    command.add_argument("--warmup", type=positive, default=3, help="repetitions before them (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="of all random numbers (default: %(default)s)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    command.add_argument("--chart", type=Path, metavar="FILE.png", help="draw the results; needs matplotlib")


def add_markdown(command: argparse.ArgumentParser) -> None:
    """Add the option for a file with the report."""
    command.add_argument("--markdown", type=Path, metavar="FILE", help="write the report as Markdown, too")


def write_outputs(
    arguments: argparse.Namespace, text: str, write_json: Callable[[Path], None], write_chart: Callable[[Path], None]
) -> None:
    """Print the report and write the files that were asked for."""
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text + "\n", encoding="utf-8")
    if arguments.json is not None:
        write_json(arguments.json)
    if arguments.chart is not None:
        write_chart(arguments.chart)
