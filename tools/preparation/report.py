"""What the command prints and writes when it has made token files."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from moe_framework.errors import DataError
from tools.conversion.progress import format_bytes
from tools.preparation.prepare import Prepared

# What Hydra reads in a value without quotes.
_PLAIN = re.compile(r"[\w./:@%+~-]+")


def to_text(prepared: Prepared) -> str:
    """Return what was made, in a few lines, with the command that trains on it."""
    found = prepared.description
    num_files, num_bytes = len(found["inputs"]), sum(file["bytes"] for file in found["inputs"])
    lines = [
        f"{prepared.prefix}.bin, .idx, .json: {found['documents']:,} documents, {found['tokens']:,} tokens "
        f"({found['dtype']}) of {num_files} {'file' if num_files == 1 else 'files'} ({format_bytes(num_bytes)}) in "
        f"{prepared.seconds:.1f} s",
        _endings(found),
    ]
    if found["empty_documents_left_out"]:
        lines.append(f"left out: {found['empty_documents_left_out']:,} documents without a token")
    if found["documents_with_eos_in_text"]:
        lines.append(
            f"note: the text of {found['documents_with_eos_in_text']:,} documents has {found['eos']['token']}, which "
            "was read as that token"
        )
    if found["unknown_tokens"]:
        lines.append(f"note: {found['unknown_tokens']:,} tokens stand for text that the tokenizer does not know")
    return "\n".join([*lines, "train on it:", f"  {training_command(prepared)}"])


def training_command(prepared: Prepared) -> str:
    """Return the command that trains a small model on the token files."""
    path = str(prepared.prefix.absolute())
    if not _PLAIN.fullmatch(path):
        # Hydra reads a backslash as itself, but for those right before a quote.
        trailing = path[len(path.rstrip("\\")) :]
        path = "'" + re.sub(r"(\\*)'", r"\1\1\'", path) + trailing + "'"
    words = ["torchrun", "--nproc_per_node=2", "train_fsdp2_ep.py", "--config-name", "L0_sanity"]
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", prepared.prefix.name).lstrip(".-")
    keys = {
        "run.name": name or "text",
        "data.path": path,
        # L0_sanity is for genomes.
        "data.reverse_complement": "false",
        "model.vocab_size": prepared.description["vocab_size"],
    }
    return shlex.join([*words, *(f"{key}={value}" for key, value in keys.items())])


def write_json(prepared: Prepared, path: Path) -> None:
    """Write the description, with how long it took.

    Args:
        prepared: What was made.
        path: The file; an older one is replaced.

    Raises:
        DataError: It cannot be written.
    """
    tokens_per_second = round(prepared.description["tokens"] / max(prepared.seconds, 1e-9))
    measured: dict[str, Any] = {"seconds": round(prepared.seconds, 3), "tokens_per_second": tokens_per_second}
    content = {"prefix": str(prepared.prefix), **prepared.description, **measured}
    try:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"--json={path}: cannot be written ({error.strerror}). Give another path.") from None


def _endings(found: dict[str, Any]) -> str:
    bos, eos = found["bos"], found["eos"]
    begins = f"begins with {bos['token']} ({bos['id']}) and " if bos else ""
    ends = f"ends with {eos['token']} ({eos['id']}, from {eos['origin']})" if eos else "has no end-of-document token"
    return f"each document {begins}{ends}; vocabulary of {found['vocab_size']:,}"
