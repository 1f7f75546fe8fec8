"""Show what a checkpoint holds, in any of the three formats, or how two checkpoints differ.

python tools/inspect_checkpoint.py PATH --diff OTHER
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_framework.checkpoint.convert.inspect import Progress

DIFFERENT_EXIT_CODE = 1


def main(argv: Sequence[str]) -> int:
    """Inspect.

    Args:
        argv: The arguments after the program's name.

    Returns:
        The exit code: 0; 1 if `--diff` found differences; 2 for an error that the user can correct.

    Raises:
        SystemExit: The command line cannot be parsed, or asks for help.
    """
    from moe_framework.errors import MoeFrameworkError
    from tools.command_line import show_error

    arguments = build_parser().parse_args(argv)
    try:
        if arguments.diff is not None:
            return show_differences(arguments)
        show(arguments)
    except MoeFrameworkError as error:
        return show_error(error)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    from tools.command_line import positive

    parser = argparse.ArgumentParser(prog="inspect_checkpoint.py", description="Show what a checkpoint holds.")
    parser.add_argument("path", type=Path, metavar="PATH", help="folder of a checkpoint: hf, dcp or megatron")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tensor", metavar="NAME", help="show one tensor's numbers")
    what.add_argument("--diff", type=Path, metavar="OTHER", help="show which tensors differ, and by how much")
    parser.add_argument("--no-norms", action="store_true", help="leave the norms out: no tensor is read")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--allow-pickle", action="store_true", help="read .bin files, as weights only")
    parser.add_argument("--workers", type=positive, default=4, help="threads (default: %(default)s)")
    return parser


def show(arguments: argparse.Namespace) -> None:
    """Print the table of a checkpoint and how far training was, or one tensor's numbers.

    Args:
        arguments: Parsed.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or unsafe, or lacks the tensor.
    """
    from moe_framework.checkpoint.convert.formats import open_checkpoint
    from moe_framework.checkpoint.convert.inspect import progress_of, sample_of, statistics_of, table_of

    source, kind = open_checkpoint(arguments.path, allow_pickle=arguments.allow_pickle)
    try:
        if arguments.tensor is not None:
            sample = sample_of(source, arguments.tensor)
            statistics = statistics_of(source, [arguments.tensor], workers=1)
            entry = next(row for row in table_of(source, statistics) if row["name"] == arguments.tensor)
            numbers = statistics[arguments.tensor]
            entry |= {
                "minimum": numbers.least,
                "maximum": numbers.greatest,
                "mean": numbers.total / max(numbers.count, 1),
                "nonfinite": numbers.nonfinite,
                "first": sample,
            }
            _print_entry(entry, arguments.json)
            return
        names = [] if arguments.no_norms else list(source.tensors())
        rows = table_of(source, statistics_of(source, names, workers=arguments.workers))
    finally:
        source.close()
    _print_table(source.path, kind, progress_of(source), rows, arguments.json)


def show_differences(arguments: argparse.Namespace) -> int:
    """Print how two checkpoints differ; of different formats, under our names.

    Args:
        arguments: Parsed.

    Returns:
        The exit code: 0 if nothing differs, or 1.

    Raises:
        CheckpointError: A checkpoint is missing, damaged, unsafe or incomplete.
    """
    from moe_framework.checkpoint.convert.formats import open_checkpoint
    from moe_framework.checkpoint.convert.inspect import Difference, differences, under_our_names

    one, kind = open_checkpoint(arguments.path, allow_pickle=arguments.allow_pickle)
    other, other_kind = open_checkpoint(arguments.diff, allow_pickle=arguments.allow_pickle)
    try:
        same_names = kind == other_kind and one.tensors().keys() == other.tensors().keys()
        pair = (one, other) if same_names else (under_our_names(one, kind), under_our_names(other, other_kind))
        found = differences(*pair, workers=arguments.workers)
        total = len(pair[0].tensors().keys() | pair[1].tensors().keys())
    finally:
        one.close()
        other.close()
    rows: list[dict[str, Any]] = [
        {"name": name, "largest": difference.largest, "relative": difference.relative, "elements": difference.count}
        if isinstance(difference, Difference)
        else {"name": name, "problem": difference}
        for name, difference in sorted(found.items())
    ]
    if arguments.json:
        print(json.dumps({"tensors": total, "different": rows}, indent=1))
    else:
        for row in rows:
            print(f"{row['name']}: {_describe(row)}")
        print(f"{len(rows)} of {total} tensors differ")
    return DIFFERENT_EXIT_CODE if rows else 0


def _describe(row: dict[str, Any]) -> str:
    if "problem" in row:
        return row["problem"]
    return f"{row['elements']} elements, by {row['largest']:.3g} at most; {row['relative']:.3g} of the norm"


def _print_entry(entry: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(entry, indent=1))
        return
    for key, value in entry.items():
        print(f"{key}: {value}")


def _print_table(path: Path, kind: str, progress: "Progress", rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"path": str(path), "format": kind, **asdict(progress), "tensors": rows}, indent=1))
        return
    cells = [("tensor", "shape", "dtype", "stored in", "norm")]
    for row in rows:
        norm = "" if row["norm"] is None else f"{row['norm']:.6g}"
        cells.append((row["name"], str(row["shape"]), row["dtype"], row["stored"], norm))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(f"{path}: {kind}, {len(rows)} tensors; {progress}")


if __name__ == "__main__":
    # Started as a file, Python looks for modules in tools/ and not in the repository's root.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main(sys.argv[1:]))
