"""Several data sets, mixed in fixed shares.

The samples come in blocks. Every block holds the same number of samples of each data set, in an order of its own, so
that which data set a sample is from, and its how-manieth of that data set it is, is arithmetic on its global index:
nothing is stored, and a run resumes at any layout. Each data set goes through epochs of its own.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe_framework.data.order import sample_at
from moe_framework.data.rows import Row, RowSource

BLOCK = 1_000_000
"""Samples in which the shares are exact: a weight is rounded to a millionth."""


@dataclass(frozen=True, eq=False)
class BlendedRows:
    """The rows of all parts, numbered one part after the other.

    Attributes:
        parts: Rows of one length; each has some.
        counts: `[parts]` samples of each in a block; they add up to `BLOCK`, and each is at least 1.
    """

    parts: tuple[RowSource, ...]
    counts: tuple[int, ...]

    @property
    def seq_length(self) -> int:
        """Positions S of a row."""
        return self.parts[0].seq_length

    @property
    def path(self) -> str:
        """The shares and paths of the parts."""
        return " ".join(f"{count / BLOCK:g} {part.path}" for count, part in zip(self.counts, self.parts, strict=True))

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def order(self, samples: np.ndarray, seed: int) -> np.ndarray:
        """See `RowSource.order`; each part is shuffled by itself."""
        samples = np.asarray(samples, dtype=np.int64)
        places, blocks = sample_at(samples, BLOCK, seed)
        ends = np.cumsum(self.counts)
        chosen = np.searchsorted(ends, places, side="right")
        rows = np.empty_like(samples)
        for part, (source, count) in enumerate(zip(self.parts, self.counts, strict=True)):
            own = chosen == part
            numbers = blocks[own] * count + places[own] - (ends[part] - count)
            rows[own] = self._offsets[part] + source.order(numbers, seed + part + 1)
        return rows

    def materialise(self, row: int, reverse_complement: bool = False) -> Row:
        """See `RowSource.materialise`."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        part = int(np.searchsorted(self._offsets, row, side="right")) - 1
        return self.parts[part].materialise(row - int(self._offsets[part]), reverse_complement)

    @cached_property
    def _offsets(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self.parts)])


def counts_of(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return how many samples of a block each data set has, by the largest remainder.

    Args:
        weights: Positive and finite; only their ratios count.

    Returns:
        Integers that add up to `BLOCK`; 0 where a share is too small for a sample.
    """
    # Relative to the largest first: the sum of the largest numbers there are has no value.
    relative = np.array(weights) / max(weights)
    shares = relative / relative.sum() * BLOCK
    counts = np.floor(shares).astype(np.int64)
    missing = BLOCK - int(counts.sum())
    counts[np.argsort(-(shares - counts), kind="stable")[:missing]] += 1
    return tuple(counts.tolist())
