"""Rows: what a data set gives, whatever it was read from."""

from typing import NamedTuple, Protocol

import numpy as np

from moe_framework.data.tokenizer import IGNORE_INDEX, PAD

PADDING_DOCUMENT = -1


class Row(NamedTuple):
    """One sample.

    Attributes:
        tokens: `[S] int64` inputs; PAD after the last document.
        targets: `[S] int64` next tokens; IGNORE_INDEX where there is none to predict, and on padding.
        positions: `[S] int64`, from 0 in each document; 0 on padding.
        document_ids: `[S] int64` 0, 1, 2, …; PADDING_DOCUMENT on padding.
        num_tokens: Positions that are not padding.
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    document_ids: np.ndarray
    num_tokens: int


class RowSource(Protocol):
    """Rows of one length, each built when it is asked for, the same on every rank."""

    @property
    def seq_length(self) -> int:
        """Positions S of a row."""
        ...

    @property
    def path(self) -> str:
        """Where they come from, as `data.path` names it."""
        ...

    def __len__(self) -> int: ...

    def order(self, samples: np.ndarray, seed: int) -> np.ndarray:
        """Find the rows that global sample indices stand for.

        Args:
            samples: `[n] int64`, at least 0; they go on for ever, epoch after epoch.
            seed: Of the order.

        Returns:
            `[n] int64` in [0, len(self)).
        """
        ...

    def materialise(self, row: int, reverse_complement: bool = False) -> Row:
        """Build one row.

        Args:
            row: Index in [0, len(self)).
            reverse_complement: Read it from the other strand; nucleotides only.

        Raises:
            IndexError: There is no such row.
            DataError: The file holds something else than it should.
        """
        ...


def empty_row(seq_length: int) -> Row:
    """Returns a row of padding only.

    Args:
        seq_length: Positions S of the row.
    """
    return Row(
        tokens=np.full(seq_length, PAD, dtype=np.int64),
        targets=np.full(seq_length, IGNORE_INDEX, dtype=np.int64),
        positions=np.zeros(seq_length, dtype=np.int64),
        document_ids=np.full(seq_length, PADDING_DOCUMENT, dtype=np.int64),
        num_tokens=0,
    )
