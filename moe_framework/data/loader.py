"""Batches for one data rank: training steps prepared in the background, and the held-out region in order.

Which samples a step holds depends on the number of samples consumed before it, and on nothing else; which of them
a rank takes is arithmetic on its data rank.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from moe_framework.data.order import flip_strand
from moe_framework.data.rows import Row, RowSource, empty_row
from moe_framework.data.tokenizer import IGNORE_INDEX
from moe_framework.errors import DataError

FILLER_SAMPLE = -1
_POLL_SECONDS = 0.1
_JOIN_SECONDS = 10.0


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch of one rank.

    Attributes:
        tokens: `[B, S] int64` inputs.
        targets: `[B, S] int64` next tokens; IGNORE_INDEX where there is no loss.
        positions: `[B, S] int64`, from 0 in each document.
        document_ids: `[B, S] int64`, -1 on padding; None when no row holds two documents (padding comes last, so
            that causal attention alone keeps it apart).
        valid_index: `[T'] int64` flat positions b · S + s that are not padding; None when there is no padding.
        num_targets: Positions with a loss, counted on the host.
        num_tokens: Positions that are not padding, counted on the host.
        sample_ids: Global sample index of each row; of the held-out data the row's number, or FILLER_SAMPLE.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    document_ids: torch.Tensor | None
    valid_index: torch.Tensor | None
    num_targets: int
    num_tokens: int
    sample_ids: tuple[int, ...]

    def to(self, device: torch.device | str) -> "Batch":
        """Returns the batch on a device; to CUDA through pinned memory, without waiting for the copy."""
        device = torch.device(device)
        moved = {}
        for item in fields(self):
            tensor = getattr(self, item.name)
            if isinstance(tensor, torch.Tensor):
                source = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
                moved[item.name] = source.to(device, non_blocking=True)
        return replace(self, **moved)


def collate(rows: list[Row], sample_ids: tuple[int, ...]) -> Batch:
    """Stacks rows into a batch on the CPU.

    Args:
        rows: At least one row, all of one length.
        sample_ids: What each row is called.
    """
    targets = np.stack([row.targets for row in rows])
    documents = np.stack([row.document_ids for row in rows])
    num_tokens = sum(row.num_tokens for row in rows)
    padded = num_tokens < documents.size
    return Batch(
        tokens=torch.from_numpy(np.stack([row.tokens for row in rows])),
        targets=torch.from_numpy(targets),
        positions=torch.from_numpy(np.stack([row.positions for row in rows])),
        document_ids=torch.from_numpy(documents) if documents.max() > 0 else None,
        valid_index=torch.from_numpy(np.flatnonzero(documents >= 0)) if padded else None,
        num_targets=int(np.count_nonzero(targets != IGNORE_INDEX)),
        num_tokens=num_tokens,
        sample_ids=sample_ids,
    )


class TrainLoader:
    """Gives one data rank its micro-batches, one optimizer step at a time, for ever.

    Micro-batch m of data rank r holds the global samples `consumed + m · ranks · micro + r · micro + j`, for j below
    the micro-batch size. Rows come back in a new order in every epoch.

    Args:
        rows: The training rows; at least one.
        global_batch_size: Samples per optimizer step, over all data ranks.
        micro_batch_size: Samples per rank and micro-batch; `num_data_ranks · micro_batch_size` divides the
            global batch size.
        data_rank: This rank's number among the data ranks.
        num_data_ranks: Ranks that take samples of their own.
        seed: Seed of the order and of the strand.
        reverse_complement: Read each sample from the other strand with probability one half.
        prefetch: Micro-batches that a background thread prepares ahead; 0 prepares them when asked.
        consumed_samples: Global samples that earlier steps have used.
    """

    def __init__(
        self,
        rows: RowSource,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        data_rank: int,
        num_data_ranks: int,
        seed: int,
        reverse_complement: bool,
        prefetch: int,
        consumed_samples: int = 0,
    ):
        samples_per_micro_step = micro_batch_size * num_data_ranks
        assert len(rows) > 0, "no rows to train on"
        assert global_batch_size % samples_per_micro_step == 0, "accumulation must be whole"
        assert 0 <= data_rank < num_data_ranks, "data_rank is not one of the data ranks"
        self._rows = rows
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._data_rank = data_rank
        self._num_data_ranks = num_data_ranks
        self._seed = seed
        self._reverse_complement = reverse_complement
        self._accumulation = global_batch_size // samples_per_micro_step
        self._consumed = consumed_samples
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._batches = self._produce(consumed_samples)
        self._thread: threading.Thread | None = None
        if prefetch > 0:
            self._queue: queue.Queue[Batch | Exception] = queue.Queue(maxsize=prefetch)
            self._thread = threading.Thread(target=self._fill_queue, name="data-prefetch", daemon=True)
            self._thread.start()

    @property
    def consumed_samples(self) -> int:
        """Global samples of all steps handed out so far: the whole position of the loader."""
        return self._consumed

    def next_step(self) -> list[Batch]:
        """Returns this rank's micro-batches of the next optimizer step, on the CPU.

        Raises:
            DataError: The data ended early, or what else the data raised.
        """
        assert not self._stop.is_set(), "the loader is closed"
        batches = [self._next_batch() for _ in range(self._accumulation)]
        self._consumed += self._global_batch_size
        return batches

    def close(self) -> None:
        """Stops the background thread; the loader gives no more steps. Closing twice does no harm."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)

    def __enter__(self) -> "TrainLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_batch(self) -> Batch:
        if self._failure is not None:
            raise self._failure
        if self._thread is None:
            return next(self._batches)
        item = self._queue.get()
        if isinstance(item, Exception):
            self._failure = item
            raise item
        return item

    def _fill_queue(self) -> None:
        try:
            for batch in self._batches:
                if not self._put(batch):
                    return
        except Exception as error:
            self._put(error)

    def _put(self, item: Batch | Exception) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def _produce(self, first_sample: int) -> Iterator[Batch]:
        while True:
            start = first_sample + self._data_rank * self._micro_batch_size
            for _ in range(self._accumulation):
                yield self._read(np.arange(start, start + self._micro_batch_size))
                start += self._num_data_ranks * self._micro_batch_size
            first_sample += self._global_batch_size

    def _read(self, samples: np.ndarray) -> Batch:
        rows = self._rows.order(samples, self._seed)
        flips = flip_strand(samples, self._seed) & self._reverse_complement
        try:
            read = [self._rows.materialise(int(row), bool(flip)) for row, flip in zip(rows, flips, strict=True)]
        except (StopIteration, EOFError) as error:
            raise DataError(
                f"data.path={self._rows.path}: data ended early, at samples {samples[0]} to {samples[-1]} "
                f"of data rank {self._data_rank}. Give every rank the same complete file."
            ) from error
        return collate(read, tuple(samples.tolist()))


def heldout_batches(
    rows: RowSource, *, micro_batch_size: int, data_rank: int, num_data_ranks: int, max_rows: int = 0
) -> Iterator[Batch]:
    """Yields one data rank's share of the held-out rows, in order and from the forward strand.

    Every rank yields the same number of batches, so that collectives line up: where rows run out, rows of padding
    fill the batch (`valid_index` then has no entry, or none for that row).

    Args:
        rows: The held-out rows.
        micro_batch_size: Rows per rank and batch.
        data_rank: This rank's number among the data ranks.
        num_data_ranks: Ranks that take rows of their own.
        max_rows: Rows to use over all ranks, evenly spread over the region; 0 for all.
    """
    yield from batches_of(
        rows,
        spread_rows(len(rows), max_rows),
        micro_batch_size=micro_batch_size,
        data_rank=data_rank,
        num_data_ranks=num_data_ranks,
    )


def spread_rows(num_rows: int, max_rows: int = 0) -> np.ndarray:
    """Choose rows evenly spread over all.

    Args:
        num_rows: Rows there are.
        max_rows: Rows to choose at most; 0 for all.

    Returns:
        `[n] int64`, ascending.
    """
    chosen = min(max_rows, num_rows) if max_rows > 0 else num_rows
    return np.arange(chosen) * num_rows // max(1, chosen)


def batches_of(
    rows: RowSource, chosen: np.ndarray, *, micro_batch_size: int, data_rank: int, num_data_ranks: int
) -> Iterator[Batch]:
    """Yields one data rank's share of chosen rows, as `heldout_batches` does.

    Args:
        rows: Where they are.
        chosen: `[n] int64` their numbers, the same on every rank.
        micro_batch_size: Rows per rank and batch.
        data_rank: This rank's number among the data ranks.
        num_data_ranks: Ranks that take rows of their own.
    """
    for first in range(0, len(chosen), num_data_ranks * micro_batch_size):
        begin = first + data_rank * micro_batch_size
        ids = chosen[begin : begin + micro_batch_size].tolist()
        ids += [FILLER_SAMPLE] * (micro_batch_size - len(ids))
        read = [empty_row(rows.seq_length) if row == FILLER_SAMPLE else rows.materialise(row) for row in ids]
        yield collate(read, tuple(ids))
