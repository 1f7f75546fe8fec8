"""Windows of sequences, the held-out split, and rows of packed windows.

Three coordinate systems meet here. *Base* coordinates count the bases of all records, one after the other; a
`Region` is an interval of them. *Token* coordinates count within one record's string `BOS bases EOS`, so that
base b of a record is token b + 1. *Positions* count the seq_length inputs of a row.

A window of n tokens is one document: n - 1 inputs, each with the next token as its target. Rows are made once,
from the data alone, so that they are the same at every parallel layout.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moe_framework.data.fasta import Sequences
from moe_framework.data.order import sample_at
from moe_framework.data.rows import Row, empty_row
from moe_framework.data.tokenizer import BOS, EOS, IGNORE_INDEX, A, NucleotideTokenizer


class Region(NamedTuple):
    """The bases [start, stop) of all records, one after the other."""

    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows, as indices into the sequences; a row is built when it is asked for.

    Attributes:
        sequences: Where the tokens are.
        seq_length: Positions S of a row.
        window_record: `[windows] int32` record of each window.
        window_start: `[windows] int64` first token, in token coordinates of the record.
        window_stop: `[windows] int64` one past the last token.
        row_offsets: `[rows + 1] int64`; row i holds the windows `row_windows[row_offsets[i]:row_offsets[i + 1]]`.
        row_windows: `[windows] int64`.
    """

    sequences: Sequences
    seq_length: int
    window_record: np.ndarray
    window_start: np.ndarray
    window_stop: np.ndarray
    row_offsets: np.ndarray
    row_windows: np.ndarray

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def path(self) -> str:
        """The file."""
        return self.sequences.path

    def order(self, samples: np.ndarray, seed: int) -> np.ndarray:
        """See `RowSource.order`."""
        return sample_at(samples, len(self), seed)[0]

    def materialise(self, row: int, reverse_complement: bool = False) -> Row:
        """Builds one row.

        Args:
            row: Index in [0, len(self)).
            reverse_complement: Read every window of the row from the other strand.

        Raises:
            IndexError: There is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        result = empty_row(self.seq_length)
        begin = 0
        for document, window in enumerate(self.row_windows[self.row_offsets[row] : self.row_offsets[row + 1]]):
            tokens = self._window_tokens(int(window))
            if reverse_complement:
                tokens = NucleotideTokenizer.complement(tokens[::-1])
            end = begin + len(tokens) - 1
            result.tokens[begin:end] = tokens[:-1]
            result.targets[begin:end] = np.where(tokens[1:] >= A, tokens[1:].astype(np.int64), IGNORE_INDEX)
            result.positions[begin:end] = np.arange(end - begin)
            result.document_ids[begin:end] = document
            begin = end
        return result._replace(num_tokens=begin)

    def _window_tokens(self, window: int) -> np.ndarray:
        record, start, stop = self.window_record[window], self.window_start[window], self.window_stop[window]
        first_base, last_base = self.sequences.offsets[record : record + 2]
        num_tokens = last_base - first_base + 2
        tokens = np.empty(stop - start, dtype=np.uint8)
        low, high = max(start, 1), min(stop, num_tokens - 1)
        tokens[low - start : high - start] = self.sequences.tokens[first_base + low - 1 : first_base + high - 1]
        if start == 0:
            tokens[0] = BOS
        if stop == num_tokens:
            tokens[-1] = EOS
        return tokens


def split_regions(sequences: Sequences, heldout_fraction: float) -> tuple[Region, Region]:
    """Cuts the bases once: everything before the cut is for training, everything after it is held out.

    Args:
        sequences: All records.
        heldout_fraction: Share of all bases, at the end, in [0, 1].

    Returns:
        The training and the held-out region; either may be empty.
    """
    cut = sequences.num_bases - round(sequences.num_bases * heldout_fraction)
    return Region(0, cut), Region(cut, sequences.num_bases)


def build_rows(sequences: Sequences, region: Region, seq_length: int, stride: int = 0) -> Rows:
    """Cuts a region into windows and packs the windows into rows.

    A record that the region covers in part is cut there: that is no true end of the sequence, so it gets no BOS or
    EOS. Consecutive windows share one token more than `stride`, because the last token of a window is a target
    only; with stride 0 every token but the first is a target exactly once.

    Args:
        sequences: All records.
        region: The bases to use.
        seq_length: Positions S of a row; a window has at most S + 1 tokens.
        stride: Tokens by which windows overlap, in [0, S).

    Returns:
        The rows, ordered by their first window; none if the region holds no two tokens.
    """
    assert 0 <= stride < seq_length, "windows must advance"
    records, starts, stops = _pieces(sequences, region)
    lengths = stops - starts
    step = seq_length - stride
    # Floor division counts the steps after the first window that still bring a new token.
    counts = 1 + np.maximum(0, -((seq_length + 1 - lengths) // step))
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    window_start = np.repeat(starts, counts) + number * step
    window_stop = np.minimum(window_start + seq_length + 1, np.repeat(stops, counts))
    row_of_window = pack(window_stop - window_start - 1, seq_length)
    num_rows = int(row_of_window.max(initial=-1)) + 1
    return Rows(
        sequences=sequences,
        seq_length=seq_length,
        window_record=np.repeat(records, counts).astype(np.int32),
        window_start=window_start,
        window_stop=window_stop,
        row_offsets=np.searchsorted(np.sort(row_of_window), np.arange(num_rows + 1)).astype(np.int64),
        row_windows=np.argsort(row_of_window, kind="stable").astype(np.int64),
    )


def _pieces(sequences: Sequences, region: Region) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns record, start and stop (token coordinates) of each part of a record inside the region."""
    begins, ends = sequences.offsets[:-1], sequences.offsets[1:]
    low, high = np.maximum(begins, region.start), np.minimum(ends, region.stop)
    starts = np.where(low == begins, 0, low - begins + 1)
    stops = np.where(high == ends, ends - begins + 2, high - begins + 1)
    # One token has no target: the lone first base after the cut of a record that ends elsewhere.
    records = np.flatnonzero((high > low) & (stops - starts >= 2))
    return records, starts[records], stops[records]


def pack(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Packs windows into rows by best-fit decreasing: each goes to the fullest row that still has room for it.

    Rows with equal room are kept in one stack, and the set of rooms in the bits of one integer, so that the time
    grows with the number of windows, not with its square.

    Args:
        sizes: `[windows]` positions of each window, in [1, capacity].
        capacity: Positions of a row.

    Returns:
        `[windows] int64` row of each window; rows are numbered by their first window.
    """
    row_of_window = np.empty(len(sizes), dtype=np.int64)
    full = np.flatnonzero(sizes == capacity)
    row_of_window[full] = np.arange(len(full))
    num_rows = len(full)
    rows_with_room: dict[int, list[int]] = {}
    rooms = 0
    short = np.flatnonzero(sizes < capacity)
    order = short[np.argsort(-sizes[short], kind="stable")]
    for window, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, num_rows
            num_rows += 1
        row_of_window[window] = row
        rows_with_room.setdefault(room - size, []).append(row)
        rooms |= 1 << (room - size)
    _, first_window, row_of_window = np.unique(row_of_window, return_index=True, return_inverse=True)
    rank = np.empty_like(first_window)
    rank[np.argsort(first_window)] = np.arange(len(first_window))
    return rank[row_of_window].astype(np.int64)
