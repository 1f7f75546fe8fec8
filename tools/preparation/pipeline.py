"""Documents to tokens on several threads, in order and in bounded memory."""

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from tools.preparation.documents import Document
from tools.preparation.tokenizer import Encoded, TextTokenizer

# A batch takes a tenth of a second: long beside the cost of handing it over, short beside a user's patience.
_BATCH_CHARACTERS = 2**18
# What a document without text counts, so that a batch has an end.
_DOCUMENT_CHARACTERS = 64
_BATCHES_AHEAD = 2
_MAX_DEFAULT_WORKERS = 16


def default_workers() -> int:
    """Return a number of threads for this machine: its cores that may be used, as far as more threads gain much."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, _MAX_DEFAULT_WORKERS)


class EncodedBatch(NamedTuple):
    """Documents that follow each other.

    Attributes:
        documents: Their tokens.
        bytes_read: Bytes on disk that had been read up to the last one.
    """

    documents: list[Encoded]
    bytes_read: int


def encode_in_order(documents: Iterable[Document], tokenizer: TextTokenizer, workers: int) -> Generator[EncodedBatch]:
    """Yield the tokens of all documents, batch by batch, in the order of the documents; closing it ends its threads.

    Threads and not processes, because the library encodes without Python's lock. What holds the lock, such as reading
    JSON and making arrays, was 3.4% of the encoding's time with documents of 14 kB, and 10% with 500 bytes: up to some
    thirty, or ten, threads it is not what limits.

    Args:
        documents: Read as they are needed, in the calling thread.
        tokenizer: Shared by all threads.
        workers: Threads that encode.

    Raises:
        DataError: A document cannot be read or encoded.
        DependencyError: A file's format needs a package that is missing.
    """
    waiting: deque[Future[EncodedBatch]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="encode") as executor:
        try:
            for batch in _batches(documents):
                waiting.append(executor.submit(_encode, batch, tokenizer))
                if len(waiting) > _BATCHES_AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text) + _DOCUMENT_CHARACTERS
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: list[Document], tokenizer: TextTokenizer) -> EncodedBatch:
    return EncodedBatch([tokenizer.encode(document) for document in batch], batch[-1].bytes_read)
