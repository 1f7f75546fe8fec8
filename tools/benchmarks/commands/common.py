"""What the subcommands share: common options, and writing what was found. Free of torch."""

import argparse
from pathlib import Path
from typing import Any, Protocol

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


class ReportModule(Protocol):
    """A module that shows what one benchmark found."""

    def to_markdown(self, report: Any, /) -> str:
        """The report as text."""
        ...

    def write_json(self, report: Any, path: Path, /) -> None:
        """Write the report as JSON."""
        ...

    def write_chart(self, report: Any, path: Path, /) -> None:
        """Draw the report."""
        ...


def write_outputs(arguments: argparse.Namespace, found: Any, report: ReportModule) -> None:
    """Print what was found and write the files that were asked for; nothing on a rank that found nothing.

    Args:
        arguments: The command line.
        found: The report; None on the ranks of a launcher other than 0.
        report: Shows it.
    """
    if found is None:
        return
    text = report.to_markdown(found)
    print(text)
    if arguments.markdown is not None:
        arguments.markdown.write_text(text + "\n", encoding="utf-8")
    if arguments.json is not None:
        report.write_json(found, arguments.json)
    if arguments.chart is not None:
        report.write_chart(found, arguments.chart)
