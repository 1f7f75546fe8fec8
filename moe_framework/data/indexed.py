"""Reads Megatron-Core's indexed token files: `PREFIX.bin` with the tokens, `PREFIX.idx` with where documents begin.

Both are mapped into memory, so that a corpus of any size takes no memory of its own, and ranks of a host share pages.

Read here and not through Megatron-Core: 0.19 cannot be imported beside the nvidia-resiliency-ext that restarts runs
(0.4), and the format is an array behind a header of 34 bytes. Source: Megatron-Core 0.19, datasets/indexed_dataset.py.
"""

import bisect
import errno
import hashlib
import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from moe_framework.errors import DataError

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = struct.Struct("<9sQBQQ")
# Megatron-Core's codes; 6 and 7 are floating point, which are no tokens.
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
SUFFIXES = (".bin", ".idx")
_MAKE = "Make the files with tools/prepare_text.py or Megatron's tools/preprocess_data.py."
_READABLE = "Give files that every rank can read."
# Entries of the index that are checked at a time.
_CHUNK = 1 << 20
# Blocks of this size, evenly spread, are what the fingerprint reads of the tokens.
_SAMPLE_BYTES, _NUM_SAMPLES = 4096, 256


@dataclass(frozen=True, eq=False)
class IndexedTokens:
    """The tokens of all documents, one after the other; every array is mapped.

    Attributes:
        path: The prefix of the two files.
        tokens: `[N]`; documents follow each other without a gap.
        pointers: `[sequences] int64` first byte of each sequence.
        documents: `[documents + 1] int64` first sequence of each document, and the number of sequences.
    """

    path: str
    tokens: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all documents."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.documents) - 1

    def start_of(self, document: int) -> int:
        """Return a document's first token, by its index in the file."""
        sequence = int(self.documents[document])
        return (
            int(self.pointers[sequence]) // self.tokens.itemsize if sequence < len(self.pointers) else len(self.tokens)
        )

    def document_of(self, token: int, first: int = 0) -> int:
        """Return the document that holds a token, by the token's index in the file.

        Args:
            token: Its index.
            first: A document that begins at or before the token.
        """
        # It reads a few entries; numpy's would copy the mapped array, whose place in the file is not aligned.
        return bisect.bisect_right(range(self.num_documents), token, lo=first, key=self.start_of) - 1

    def documents_between(self, start: int, stop: int) -> np.ndarray:
        """Return a number for each token of [start, stop): 0 in the first's document, 1 in the next, and so on.

        Returns:
            `[stop - start] int64`.
        """
        first = self.document_of(start)
        last = self.document_of(stop - 1, first)
        borders = self.pointers[self.documents[first + 1 : last + 1]] // self.tokens.itemsize
        # A document without tokens begins where the next one does; numbers count the borders that hold any.
        return np.searchsorted(np.unique(borders), np.arange(start, stop), side="right").astype(np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over sizes, type, and evenly spread samples of tokens and borders: equal for equal files.

        A change between two samples is not seen: reading terabytes at each start would take hours.
        """
        digest = hashlib.sha256(f"{self.tokens.dtype.str} {self.num_tokens} {self.num_documents}".encode())
        for array in (self.tokens, self.pointers, self.documents):
            block = max(1, _SAMPLE_BYTES // array.itemsize)
            starts = np.linspace(0, max(0, len(array) - block), _NUM_SAMPLES).astype(np.int64)
            for start in np.unique(starts):
                digest.update(array[start : start + block].tobytes())
        return digest.hexdigest()


def indexed_prefix(path: str) -> str | None:
    """Return the prefix of a pair of token files that a path names: by itself, or by either file.

    Args:
        path: From `data.path`.

    Returns:
        The prefix, or None if it names something else.
    """
    stem, suffix = os.path.splitext(path)
    if suffix in SUFFIXES:
        return stem
    return path if any(os.path.exists(path + suffix) for suffix in SUFFIXES) and not os.path.isfile(path) else None


def read_indexed(prefix: str) -> IndexedTokens:
    """Map a pair of token files.

    Args:
        prefix: Path of the files without `.bin` and `.idx`.

    Returns:
        The tokens; the index has been read through once, the tokens have not.

    Raises:
        DataError: A file is missing, cannot be read, or is something else, or the two do not fit each other.
    """
    for suffix in SUFFIXES:
        if not os.path.isfile(prefix + suffix):
            raise _error(prefix, f"no file {prefix + suffix}", _MAKE)
    try:
        dtype, lengths, pointers, documents = _read_index(prefix)
        size = os.path.getsize(prefix + ".bin")
        if size % dtype.itemsize:
            raise _error(prefix, f"{prefix}.bin ends within a token", "Copy both files again.")
        # numpy cannot map nothing.
        tokens = np.memmap(prefix + ".bin", dtype=dtype, mode="r") if size else np.empty(0, dtype)
    except OSError as error:
        few = "Raise the limit of open files (ulimit -n)." if error.errno == errno.EMFILE else _READABLE
        raise _error(prefix, f"cannot be read ({error.strerror})", few) from None
    _check_fit(prefix, lengths, pointers, documents, dtype.itemsize, size)
    return IndexedTokens(prefix, tokens, pointers, documents)


def _read_index(prefix: str) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Return the type of tokens; lengths and byte offsets of sequences; first sequences of documents."""
    path = prefix + ".idx"
    with Path(path).open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise _error(prefix, f"{path} is no index of token files", _MAKE)
    _, version, code, num_sequences, num_documents = HEADER.unpack(head)
    if version != VERSION or code not in DTYPES:
        raise _error(prefix, f"{path} has version {version} and type {code}, which cannot be read", _MAKE)
    parts = ((np.int32, num_sequences), (np.int64, num_sequences), (np.int64, num_documents))
    needed = HEADER.size + sum(np.dtype(kind).itemsize * count for kind, count in parts)
    if os.path.getsize(path) < needed:
        raise _error(prefix, f"{path} has {os.path.getsize(path)} of {needed} bytes", "Copy both files again.")
    whole = np.memmap(path, dtype=np.uint8, mode="r")
    arrays, offset = [], HEADER.size
    for kind, count in parts:
        end = offset + count * np.dtype(kind).itemsize
        arrays.append(whole[offset:end].view(kind))
        offset = end
    return np.dtype(DTYPES[code]), arrays[0], arrays[1], arrays[2]


def _check_fit(
    prefix: str, lengths: np.ndarray, pointers: np.ndarray, documents: np.ndarray, itemsize: int, size: int
) -> None:
    """Refuse sequences that do not follow each other to the end of the tokens, and documents of others."""
    if len(lengths) == 0:
        raise _error(prefix, "it holds no sequence", _MAKE)
    expected = 0
    for begin in range(0, len(lengths), _CHUNK):
        sizes = lengths[begin : begin + _CHUNK].astype(np.int64) * itemsize
        ends = expected + np.cumsum(sizes)
        if (sizes < 0).any() or (pointers[begin : begin + _CHUNK] != ends - sizes).any():
            raise _error(prefix, "its sequences do not follow each other", _MAKE)
        expected = int(ends[-1])
    if expected != size:
        raise _error(prefix, f"{prefix}.bin has {size} of {expected} bytes", "Copy both files again.")
    ordered = all(
        (np.diff(documents[begin : begin + _CHUNK + 1]) >= 0).all() for begin in range(0, len(documents), _CHUNK)
    )
    if len(documents) < 2 or documents[0] != 0 or documents[-1] != len(lengths) or not ordered:
        raise _error(prefix, "its documents are not made of its sequences", _MAKE)


def _error(prefix: str, rule: str, remedy: str) -> DataError:
    return DataError(f"data.path={prefix}: {rule}. {remedy}")
