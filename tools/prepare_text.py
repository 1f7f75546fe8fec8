"""Tokenize text into the token files that `data.path=PREFIX` trains on, in Megatron-Core's format.

python tools/prepare_text.py --tokenizer FOLDER --output data/wiki wiki/*.jsonl.gz
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Make one pair of token files.

    Args:
        argv: The arguments after the program's name.

    Returns:
        The exit code: 0, 2 for an error that the user can correct, 130 after Ctrl-C.

    Raises:
        SystemExit: The command line cannot be parsed, or asks for help.
    """
    from tools.command_line import exit_code_of
    from tools.preparation import report
    from tools.preparation.prepare import Request, prepare

    arguments = vars(build_parser().parse_args(argv))
    json_file = arguments.pop("json")

    def run() -> None:
        prepared = prepare(Request(**arguments))
        print(report.to_text(prepared))
        if json_file is not None:
            report.write_json(prepared, json_file)

    return exit_code_of(run)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its arguments are the fields of a `Request`, and `json`."""
    from tools.command_line import positive
    from tools.preparation.pipeline import default_workers

    parser = argparse.ArgumentParser(
        prog="prepare_text.py",
        description="Tokenize text into PREFIX.bin and PREFIX.idx, which data.path=PREFIX trains on, and describe them "
        "in PREFIX.json. They appear only when they are complete.",
    )
    parser.add_argument(
        "inputs", type=Path, nargs="+", metavar="INPUT", help=".jsonl, .txt (also .gz, .zst), .parquet, or a folder"
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="PATH", help="Hugging Face folder, or its tokenizer.json"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="PREFIX", help="files to make, without .bin")
    parser.add_argument(
        "--field", default="text", metavar="NAME", help="the text's key or column (default: %(default)s)"
    )
    parser.add_argument("--lines", action="store_true", help="each line of a .txt file is a document, not the file")
    parser.add_argument(
        "--workers", type=positive, default=default_workers(), metavar="N", help="threads (default: %(default)s)"
    )
    parser.add_argument("--bos", metavar="TOKEN", help="put before each document (default: nothing)")
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument(
        "--eos", metavar="TOKEN", help="put after each document (default: what the tokenizer's folder says)"
    )
    ends.add_argument("--no-eos", action="store_true", help="put nothing after a document")
    parser.add_argument("--overwrite", action="store_true", help="replace files of this name, once complete")
    parser.add_argument("--limit", type=positive, metavar="N", help="read the first N documents only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the description and the speed here as well")
    return parser


if __name__ == "__main__":
    # Started as a file, Python looks for modules in tools/ and not in the repository's root.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main(sys.argv[1:]))
