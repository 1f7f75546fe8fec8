"""Convert a checkpoint between Hugging Face's format, ours (dcp) and Megatron-Core's, tensor by tensor.

python tools/convert_checkpoint.py --from hf --to dcp SRC DST --verify
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_framework.checkpoint.convert.plan import Plan, Request

_FORMATS = ("hf", "dcp", "megatron")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def main(argv: Sequence[str]) -> int:
    """Run one conversion.

    Args:
        argv: The arguments after the program's name.

    Returns:
        The exit code: 0, 2 for an error that the user can correct, 130 after Ctrl-C.

    Raises:
        SystemExit: The command line cannot be parsed, or asks for help.
    """
    from tools.command_line import exit_code_of

    arguments = build_parser().parse_args(argv)
    return exit_code_of(lambda: run(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    from tools.command_line import positive

    parser = argparse.ArgumentParser(
        prog="convert_checkpoint.py", description="Convert a checkpoint. DST appears only when it is complete."
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="folder of the checkpoint to read; never changed")
    parser.add_argument("target", type=Path, metavar="DST", help="folder to make; refused if it exists")
    parser.add_argument("--from", dest="source_format", choices=_FORMATS, help="format of SRC (default: recognised)")
    parser.add_argument("--to", dest="target_format", choices=_FORMATS, required=True, help="format of DST")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="dtype of the weights (default: SRC's)")
    parser.add_argument(
        "--max-shard-size", type=parse_size, metavar="SIZE", help="size of DST's files, such as 500MB (default: 5GB)"
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="keep the first N rows of a padded vocabulary")
    parser.add_argument(
        "--like",
        type=Path,
        metavar="DIR",
        help="Hugging Face folder whose config.json and tokenizer files fit the model",
    )
    parser.add_argument("--optimizer", action="store_true", help="take the optimizer's state along (dcp to dcp)")
    parser.add_argument("--allow-pickle", action="store_true", help="read .bin files, as weights only")
    parser.add_argument("--workers", type=positive, default=4, help="threads (default: %(default)s)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="list of all tensors (default: DST.report.json)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="check and list everything, write nothing")
    what.add_argument("--verify", action="store_true", help="read the result back and compare before DST appears")
    what.add_argument("--verify-only", action="store_true", help="compare a DST that was written before with SRC")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Plan, convert, verify and report, as the arguments say.

    Args:
        arguments: Parsed.

    Raises:
        CheckpointError: The conversion is impossible, or failed; nothing is left of the target.
    """
    from moe_framework.checkpoint.convert.convert import check_target
    from moe_framework.checkpoint.convert.plan import make_plan

    plan = make_plan(_request(arguments))
    try:
        if arguments.verify_only:
            verified = _verify(plan, plan.request.target, arguments.workers)
            print(f"{plan.request.target}: {len(verified)} tensors of {plan.request.source} come back unchanged.")
            return
        check_target(plan)
        if arguments.dry_run:
            _print_plan(plan)
        else:
            _convert(plan, arguments)
    finally:
        plan.source.close()


def parse_size(text: str) -> int:
    """Parse a size such as `5GB`, `500MB`, `2GiB` or a number of bytes.

    Args:
        text: The size.

    Returns:
        Bytes.

    Raises:
        argparse.ArgumentTypeError: It is no size above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    size = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size. Give one such as 5GB or 500MB.")
    return size


def _request(arguments: argparse.Namespace) -> "Request":
    import torch

    from moe_framework.checkpoint.convert.plan import Request

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
    return Request(
        source=arguments.source,
        target=arguments.target,
        target_format=arguments.target_format,
        source_format=arguments.source_format,
        dtype=dtypes[arguments.dtype],
        optimizer=arguments.optimizer,
        vocab_size=arguments.vocab_size,
        like=arguments.like,
        max_shard_bytes=arguments.max_shard_size,
        allow_pickle=arguments.allow_pickle,
    )


def _convert(plan: "Plan", arguments: argparse.Namespace) -> None:
    from moe_framework.checkpoint.convert.convert import convert, write_report
    from tools.conversion.progress import ByteProgress, format_bytes

    verified: dict[str, str] | None = None

    def verify(folder: Path) -> None:
        nonlocal verified
        progress.close()  # a terminal shows one bar at a time
        verified = _verify(plan, folder, arguments.workers)

    started = time.perf_counter()
    if plan.source_format == "dcp":
        print(f"comparing the files of {plan.request.source} with their checksums first", file=sys.stderr)
    with ByteProgress("converting", plan.num_bytes) as progress:
        checksums = convert(
            plan,
            workers=arguments.workers,
            on_bytes=progress.advance,
            before_publishing=verify if arguments.verify else None,
        )
    seconds = time.perf_counter() - started
    report = arguments.report or plan.request.target.with_name(plan.request.target.name + ".report.json")
    write_report(report, plan, checksums, verified)
    _print_left_out(plan)
    print(f"{plan.request.target}: {len(checksums)} tensors, {format_bytes(plan.num_bytes)} in {seconds:.1f} s")
    if verified is not None:
        print(f"verified: {len(verified)} tensors of {plan.request.source} come back unchanged")
    print(f"every tensor with its source and checksum: {report}")


def _verify(plan: "Plan", folder: Path, workers: int) -> dict[str, str]:
    from moe_framework.checkpoint.convert.convert import verify
    from tools.conversion.progress import ByteProgress

    with ByteProgress("verifying", plan.num_bytes) as progress:
        return verify(plan, folder, workers=workers, on_bytes=progress.advance)


def _print_plan(plan: "Plan") -> None:
    from moe_framework.checkpoint.convert.convert import describe
    from tools.conversion.progress import format_bytes

    tensors = describe(plan, {})
    for tensor in tensors:
        sources = tensor["sources"]
        made_of = sources[0] if len(sources) == 1 else f"{len(sources)} tensors: {sources[0]} … {sources[-1]}"
        print(f"{tensor['name']} {tensor['shape']} {tensor['dtype']} ← {made_of}")
    _print_left_out(plan)
    print(f"{len(tensors)} tensors, {format_bytes(plan.num_bytes)}; nothing was written (--dry-run).")


def _print_left_out(plan: "Plan") -> None:
    if plan.left_out:
        print(f"not converted: {len(plan.left_out)} tensors, such as {plan.left_out[0]}")


if __name__ == "__main__":
    # Started as a file, Python looks for modules in tools/ and not in the repository's root.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tools.command_line import INTERRUPTED_EXIT_CODE

    code = main(sys.argv[1:])
    if code == INTERRUPTED_EXIT_CODE:
        # Threads may still be inside torch, whose end aborts the interpreter's now and then.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
