"""Documents of text, one after the other, from files of every format.

A file that cannot be read as what its name says ends the command: a corpus that silently lacks lines is worse than
none.
"""

import codecs
import json
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

from moe_framework.errors import DataError
from tools.preparation.compression import damage_errors, open_plain
from tools.preparation.inputs import JSONL, PARQUET, InputFile
from tools.preparation.parquet import read_parquet

# Tokenizing takes some 120 bytes of memory per byte of a document, in each thread.
MAX_DOCUMENT_BYTES = 16 * 2**20
_SPLIT = "Split the document."


class Document(NamedTuple):
    """One document.

    Attributes:
        text: Its text, which UTF-8 can encode.
        place: Where it is, for messages.
        bytes_read: Bytes on disk that had been read to get here, of all files together.
    """

    text: str
    place: str
    bytes_read: int = 0


class Reader:
    """Reads the documents of all files in their order.

    Args:
        files: What to read.
        field: The text's key in .jsonl, its column in .parquet.
        lines: Whether each line of a .txt file is a document, and not the whole file.

    Attributes:
        num_bytes: Bytes on disk of all files.
    """

    def __init__(self, files: Sequence[InputFile], field: str, lines: bool):
        self.num_bytes = sum(file.num_bytes for file in files)
        self._files = files
        self._field = field
        self._lines = lines
        self._finished_bytes = 0
        self._file_bytes = 0

    def __iter__(self) -> Iterator[Document]:
        """Yield every document.

        Raises:
            DataError: A file is damaged, or not of its format, or has a document without text or too long a one.
            DependencyError: A file's format needs a package that is missing.
        """
        for file in self._files:
            try:
                yield from self._documents(file)
            except damage_errors() as error:
                raise DataError(f"{file.path}: damaged or incomplete ({error}). Copy or make it again.") from None
            except OSError as error:
                # gzip's own error carries no number.
                rule = f"cannot be read ({error.strerror})" if error.errno else f"damaged or incomplete ({error})"
                raise DataError(f"{file.path}: {rule}. Copy or make it again, or check its permissions.") from None
            self._finished_bytes += file.num_bytes

    def _documents(self, file: InputFile) -> Iterator[Document]:
        if file.format == PARQUET:
            for text, place in read_parquet(file, self._field, self._move):
                yield self._document(text, place)
            return
        with file.path.open("rb") as raw, open_plain(file, raw) as stream:
            if file.format == JSONL:
                documents = _read_jsonl(file, stream, self._field)
            else:
                documents = _numbered_lines(file, stream) if self._lines else _read_whole(file, stream)
            for text, place in documents:
                self._move(raw.tell())
                yield self._document(text, place)

    def _move(self, num_bytes: int) -> None:
        self._file_bytes = num_bytes

    def _document(self, text: str, place: str) -> Document:
        _check(text, place)
        return Document(text, place, self._finished_bytes + self._file_bytes)


def _check(text: str, place: str) -> None:
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: half a surrogate pair at character {error.start}, which is no text. Correct the text."
        ) from None
    if size > MAX_DOCUMENT_BYTES:
        raise DataError(f"{place}: {size} bytes; a document has at most {MAX_DOCUMENT_BYTES}. {_SPLIT}")


def _numbered_lines(file: InputFile, stream: BinaryIO) -> Iterator[tuple[str, str]]:
    """Yield each line without its end, and where it is; lines of white space alone are left out."""
    # In JSON a character may take six bytes.
    limit = 8 * MAX_DOCUMENT_BYTES
    number = 0
    while line := stream.readline(limit + 1):
        number += 1
        place = f"{file.path}, line {number}"
        if len(line) > limit:
            raise DataError(f"{place}: longer than {limit} bytes. {_SPLIT}")
        text = _decode(line, place, first=number == 1).rstrip("\r\n")
        if text and not text.isspace():
            yield text, place


def _decode(content: bytes, place: str, *, first: bool) -> str:
    if first:
        content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 (byte {error.start}, {error.reason}). Convert the file to UTF-8."
        ) from None


def _read_jsonl(file: InputFile, stream: BinaryIO, field: str) -> Iterator[tuple[str, str]]:
    for line, place in _numbered_lines(file, stream):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            # JSON's own message counts lines within the line.
            why = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(f"{place}: not JSON ({why}). Correct or remove the line.") from None
        if not isinstance(record, dict):
            raise DataError(f"{place}: not a JSON object. Each line is one, such as {{{json.dumps(field)}: …}}.")
        if field not in record:
            known = ", ".join(list(record)[:8]) or "none"
            raise DataError(f"--field={field}: missing in {place}, which has: {known}. Name the text's field.")
        text = record[field]
        if not isinstance(text, str):
            raise DataError(
                f"--field={field}: no string in {place}, but {type(text).__name__}. Correct or remove the line, or "
                "name another field."
            )
        yield text, place


def _read_whole(file: InputFile, stream: BinaryIO) -> Iterator[tuple[str, str]]:
    content = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise DataError(
            f"{file.path}: more than {MAX_DOCUMENT_BYTES} bytes, and a .txt file is one document. Split it, or give "
            "--lines if each line is one."
        )
    yield _decode(content, str(file.path), first=True), str(file.path)
