"""Writes Megatron-Core's indexed token files: `PREFIX.bin` and `PREFIX.idx`, which `data.path=PREFIX` trains on.

Each document is one sequence. Nothing grows with the number of documents but the files themselves: lengths go into
the index as they come, and what follows from them is computed in blocks at the end.
"""

import contextlib
import fcntl
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from moe_framework.data.indexed import DTYPES, HEADER, MAGIC, SUFFIXES, VERSION
from moe_framework.errors import DataError

PARTIAL_SUFFIX = ".partial"
# Megatron-Core's rule: some room below 2^16, so that padding a vocabulary does not change the type.
UINT16_VOCAB_SIZE = 65_500
MAX_VOCAB_SIZE = 2**31
MAX_DOCUMENT_TOKENS = 2**31 - 1
_BUFFER_BYTES = 2**20
# Entries of the index that are held in memory.
_BLOCK = 2**17


class IndexedWriter:
    """Writes documents one after the other; a context manager, which publishes both files when it ends well.

    Until then they have `.partial` names. At the end the index takes its name last, so that there is never an index
    without its tokens; after an exception, nothing is left.

    Args:
        prefix: Path of the files without `.bin` and `.idx`; its folder exists.
        vocab_size: Every token is below it. Tokens are stored as uint16 below 65,500, else as int32.
        overwrite: Replace files that exist, once the new ones are complete.

    Attributes:
        num_documents: Documents written.
        num_tokens: Tokens written.
        num_empty: Documents without a token, which are counted and not written.
    """

    def __init__(self, prefix: Path, vocab_size: int, *, overwrite: bool = False):
        if not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise DataError(f"vocab_size={vocab_size} must be from 1 to {MAX_VOCAB_SIZE}. Give the tokenizer's.")
        self.num_documents = self.num_tokens = self.num_empty = 0
        self._prefix = prefix
        self._paths = output_paths(prefix)
        self._vocab_size = vocab_size
        self._overwrite = overwrite
        self._dtype = np.dtype("<u2" if vocab_size < UINT16_VOCAB_SIZE else "<i4")
        self._description: str | None = None
        self._lengths = array("i")
        # What is open under its `.partial` name, by its final name, in the order of publication.
        self._files: dict[Path, BinaryIO] = {}
        self._published: list[Path] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the tokens written."""
        return self.num_tokens * self._dtype.itemsize

    @property
    def dtype(self) -> np.dtype:
        """Type in which tokens are stored, little endian."""
        return self._dtype

    def __enter__(self) -> Self:
        """Open the files.

        Raises:
            DataError: They exist, cannot be written, or are being written by another process.
        """
        check_output(self._prefix, overwrite=self._overwrite)
        try:
            with self._writing():
                for path in self._paths:
                    self._files[path] = _open_alone(path)
                # Another process may have published between the first look and the lock.
                check_output(self._prefix, overwrite=self._overwrite)
                self._index.seek(HEADER.size)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Publish the files, or remove them if an exception ended the block.

        Raises:
            DataError: They cannot be completed, or no document was added.
        """
        try:
            if kind is None:
                with self._writing():
                    self._publish()
        finally:
            self._discard()

    def add(self, tokens: np.ndarray) -> None:
        """Append one document; one without a token is only counted.

        Args:
            tokens: `[tokens]`, of an integer type.

        Raises:
            DataError: A token is not of the vocabulary, the document is too long, or the disk is full.
        """
        assert tokens.ndim == 1, "tokens are a vector"
        assert tokens.dtype.kind in "iu", "tokens are integers"
        if len(tokens) == 0:
            self.num_empty += 1
            return
        self._check(tokens)
        with self._writing():
            self._tokens.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
            self._lengths.append(len(tokens))
            if len(self._lengths) >= _BLOCK:
                self._flush_lengths()
        self.num_documents += 1
        self.num_tokens += len(tokens)

    def describe(self, description: dict[str, Any]) -> None:
        """Have `PREFIX.json` published with the two files.

        Args:
            description: What JSON can hold.
        """
        self._description = json.dumps(description, indent=2, ensure_ascii=False) + "\n"

    @property
    def _tokens(self) -> BinaryIO:
        return self._files[self._paths[0]]

    @property
    def _index(self) -> BinaryIO:
        return self._files[self._paths[2]]

    def _check(self, tokens: np.ndarray) -> None:
        name = f"document {self.num_documents + self.num_empty}"
        if len(tokens) > MAX_DOCUMENT_TOKENS:
            raise DataError(
                f"{name} has {len(tokens)} tokens; the format holds {MAX_DOCUMENT_TOKENS} in one. Split the document."
            )
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            position = int(np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))[0])
            raise DataError(
                f"{name}, token {position}: {tokens[position]} is not in [0, vocab_size={self._vocab_size}). Give the "
                "vocabulary size of the tokenizer that made it."
            )

    def _flush_lengths(self) -> None:
        self._index.write(np.array(self._lengths, dtype="<i4").data)
        del self._lengths[:]

    def _publish(self) -> None:
        if self.num_documents == 0:
            raise DataError(
                f"{self._prefix}: no document with a token was added ({self.num_empty} were empty). Give some text."
            )
        self._flush_lengths()
        self._complete_index()
        _, description, index = self._paths
        if self._description is None:
            self._remove_partial(description)
        else:
            self._files[description].write(self._description.encode())
        for stream in self._files.values():
            stream.flush()
            os.fsync(stream.fileno())
        # Where files are overwritten, the old index must not be seen beside new tokens, nor an old description.
        for path in (index, description):
            path.unlink(missing_ok=True)
        _sync(self._prefix.parent)
        for path in list(self._files):
            _partial(path).rename(path)
            self._published.append(path)
            _sync(self._prefix.parent)
            # From here on its `.partial` name may be another process's.
            self._files.pop(path).close()
        self._published.clear()

    def _complete_index(self) -> None:
        """Write the header before the lengths, and behind them the sequences' offsets and the documents' first ones."""
        index = self._index
        code = next(code for code, kind in DTYPES.items() if np.dtype(kind) == self._dtype)
        index.seek(0)
        index.write(HEADER.pack(MAGIC, VERSION, code, self.num_documents, self.num_documents + 1))
        start = 0
        for first in range(0, self.num_documents, _BLOCK):
            count = min(_BLOCK, self.num_documents - first)
            index.seek(HEADER.size + 4 * first)
            sizes = np.frombuffer(index.read(4 * count), dtype="<i4").astype("<i8") * self._dtype.itemsize
            ends = start + np.cumsum(sizes)
            index.seek(HEADER.size + 4 * self.num_documents + 8 * first)
            index.write((ends - sizes).data)
            start = int(ends[-1])
        assert start == self.num_bytes == self._tokens.tell(), "lengths and tokens differ"
        for first in range(0, self.num_documents + 1, _BLOCK):
            index.write(np.arange(first, min(first + _BLOCK, self.num_documents + 1), dtype="<i8").data)

    def _discard(self) -> None:
        """Remove what is not published, and what was published of a set that is not complete."""
        for path in list(self._files):
            self._remove_partial(path)
        for path in reversed(self._published):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self._published.clear()

    def _remove_partial(self, path: Path) -> None:
        stream = self._files.pop(path)
        # Removed while it is locked: a moment later, a file of this name may be another process's.
        with contextlib.suppress(OSError):
            _partial(path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            stream.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self._prefix}: cannot be written ({error.strerror or error}). Free space, or give a prefix on "
                "another disk or in a folder that can be written."
            ) from error


def output_paths(prefix: Path) -> tuple[Path, Path, Path]:
    """Return the files of a prefix in the order in which they are published: tokens, description, index."""
    tokens, index = (prefix.with_name(prefix.name + suffix) for suffix in SUFFIXES)
    return tokens, prefix.with_name(prefix.name + ".json"), index


def check_output(prefix: Path, *, overwrite: bool) -> None:
    """Refuse a prefix under which the files cannot be made.

    Args:
        prefix: Path of the files without `.bin` and `.idx`.
        overwrite: Whether files may be there.

    Raises:
        DataError: It names a folder or a file, its folder is missing, or files of that name are there.
    """
    if prefix.suffix in SUFFIXES:
        raise DataError(f"{prefix}: the ending is added. Give the prefix {prefix.with_suffix('')}.")
    if prefix.is_dir() or prefix.name == "":
        raise DataError(f"{prefix}: a folder, not a prefix. Give the name of the files too, such as {prefix / 'text'}.")
    if prefix.exists():
        raise DataError(f"{prefix}: a file, which data.path would mean instead of the token files. Give another name.")
    if not prefix.parent.is_dir():
        raise DataError(f"{prefix}: no folder {prefix.parent}. Make it, or give another name.")
    for path in output_paths(prefix):
        if path.is_dir():
            raise DataError(f"{path}: a folder. Give another name.")
        if not overwrite and (path.exists() or path.is_symlink()):
            raise DataError(f"{path}: exists, and is not overwritten. Give another name, or remove it first.")


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL_SUFFIX)


def _open_alone(path: Path) -> BinaryIO:
    """Open a file's `.partial`, which no other process is writing, and empty it."""
    partial = _partial(path)
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o666)
    stream = os.fdopen(descriptor, "r+b", buffering=_BUFFER_BYTES)
    try:
        try:
            # Released by the kernel however the process ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who held it before may have renamed or removed the file that was opened.
            alone = os.path.samestat(os.fstat(descriptor), partial.stat())
        except (BlockingIOError, FileNotFoundError):
            alone = False
        if not alone:
            raise DataError(f"{path}: another process is writing it. Wait for it, or give another name.")
        os.ftruncate(descriptor, 0)
    except BaseException:
        stream.close()
        raise
    return stream


def _sync(folder: Path) -> None:
    """Make the names in a folder durable, in this order: a file's own fsync does not cover them."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
