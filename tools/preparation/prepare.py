"""Tokenizes files of text into a pair of token files, and describes what was made."""

import contextlib
import itertools
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import moe_framework
from moe_framework.data.indexed_writer import IndexedWriter, check_output
from moe_framework.errors import DataError
from tools.conversion.progress import format_bytes
from tools.preparation.documents import Reader
from tools.preparation.inputs import InputFile, find_inputs
from tools.preparation.pipeline import encode_in_order
from tools.preparation.progress import TextProgress
from tools.preparation.tokenizer import TextTokenizer, load_tokenizer

# What has to be read before the tokens of the rest can be estimated, in bytes on disk.
_SAMPLE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Request:
    """What to make.

    Attributes:
        tokenizer: A Hugging Face folder, or its tokenizer.json.
        output: Path of the token files without `.bin` and `.idx`.
        inputs: Files and folders of text, in order.
        field: The text's key in .jsonl, its column in .parquet.
        lines: Whether each line of a .txt file is a document.
        workers: Threads that tokenize.
        bos: Token before each document, or None.
        eos: Token after each document; None for the one that the tokenizer's folder names.
        no_eos: Put none.
        overwrite: Replace files that exist.
        limit: Read this many documents at most; None for all.
    """

    tokenizer: Path
    output: Path
    inputs: Sequence[Path]
    field: str = "text"
    lines: bool = False
    workers: int = 1
    bos: str | None = None
    eos: str | None = None
    no_eos: bool = False
    overwrite: bool = False
    limit: int | None = None


@dataclass
class Counts:
    """What was found on the way.

    Attributes:
        documents: Documents read.
        with_eos_in_text: Those whose text has the end-of-document token.
        unknown_tokens: Tokens that stand for text that the tokenizer does not know.
    """

    documents: int = 0
    with_eos_in_text: int = 0
    unknown_tokens: int = 0


@dataclass(frozen=True)
class Prepared:
    """What was made.

    Attributes:
        prefix: Path of the token files without `.bin` and `.idx`.
        description: What `PREFIX.json` holds.
        seconds: Time that it took.
    """

    prefix: Path
    description: dict[str, Any]
    seconds: float


def prepare(request: Request) -> Prepared:
    """Make the token files.

    Args:
        request: What to make.

    Raises:
        DataError: An input, the tokenizer or the output is not as it must be; nothing is left of the output.
        DependencyError: A package that an input needs is missing.
    """
    began = time.monotonic()
    check_output(request.output, overwrite=request.overwrite)
    files = find_inputs(request.inputs)
    tokenizer = load_tokenizer(request.tokenizer, bos=request.bos, eos=request.eos, no_eos=request.no_eos)
    with IndexedWriter(request.output, tokenizer.vocab_size, overwrite=request.overwrite) as writer:
        counts = _write(writer, Reader(files, request.field, request.lines), tokenizer, request)
        description = _describe(request, files, tokenizer, writer, counts)
        writer.describe(description)
    return Prepared(request.output, description, time.monotonic() - began)


def _write(writer: IndexedWriter, reader: Reader, tokenizer: TextTokenizer, request: Request) -> Counts:
    counts = Counts()
    space_checked = False
    documents = itertools.islice(reader, request.limit)
    encoding = encode_in_order(documents, tokenizer, request.workers)
    with TextProgress(reader.num_bytes) as progress, contextlib.closing(encoding) as batches:
        for batch in batches:
            for encoded in batch.documents:
                writer.add(encoded.tokens)
                counts.with_eos_in_text += encoded.num_eos_in_text > 0
                counts.unknown_tokens += encoded.num_unknown
            counts.documents += len(batch.documents)
            done = max(batch.bytes_read / reader.num_bytes, counts.documents / (request.limit or float("inf")))
            progress.update(min(done, 1.0), batch.bytes_read, writer.num_documents, writer.num_tokens)
            if not space_checked and batch.bytes_read >= _SAMPLE_BYTES:
                space_checked = True
                _check_space(request.output, writer.num_bytes, done)
    return counts


def _check_space(output: Path, num_bytes: int, done: float) -> None:
    """Refuse to fill the disk, as far as the first tokens tell: only they say how much of the inputs is text."""
    left = round(num_bytes / done) - num_bytes
    free = shutil.disk_usage(output.parent).free
    if left > free:
        raise DataError(
            f"--output={output}: needs about {format_bytes(left)} more, and {output.parent} has {format_bytes(free)} "
            "free. Free some, give a folder on another disk, or --limit the documents."
        )


def _describe(
    request: Request, files: Sequence[InputFile], tokenizer: TextTokenizer, writer: IndexedWriter, counts: Counts
) -> dict[str, Any]:
    return {
        "documents": writer.num_documents,
        "tokens": writer.num_tokens,
        "empty_documents_left_out": writer.num_empty,
        "documents_with_eos_in_text": counts.with_eos_in_text,
        "unknown_tokens": counts.unknown_tokens,
        "dtype": writer.dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "eos": None if tokenizer.eos is None else asdict(tokenizer.eos),
        "bos": None if tokenizer.bos is None else asdict(tokenizer.bos),
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.sha256},
        "inputs": [{"name": file.name, "bytes": file.num_bytes} for file in files],
        "field": request.field,
        "lines": request.lines,
        "limit": request.limit,
        "versions": {
            "moe_framework": moe_framework.__version__,
            "tokenizers": tokenizer.library_version,
            "python": platform.python_version(),
        },
    }
