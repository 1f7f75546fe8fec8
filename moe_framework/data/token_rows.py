"""Rows of a token file: the documents one after the other, cut every S tokens."""

from dataclasses import dataclass

import numpy as np

from moe_framework.data.indexed import IndexedTokens
from moe_framework.data.order import sample_at
from moe_framework.data.rows import Row
from moe_framework.data.tokenizer import IGNORE_INDEX
from moe_framework.errors import DataError


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Row i has the tokens `start + i·S … start + (i + 1)·S - 1` as inputs and the next of each as its target.

    Where a row begins follows from its number, so that a corpus needs no index of rows, and no row has padding. What is
    left at the end, fewer than S tokens and one more as the last target, is not used.

    Attributes:
        tokens: All tokens.
        start: First token.
        stop: One past the last.
        seq_length: Positions S of a row.
        vocab_size: Of the model; a larger token is refused where it is read.
        separate_documents: Each document is one of its own in a row: positions begin at 0, its last token has no
            target, and attention is to stay inside. Otherwise the row is one document.
    """

    tokens: IndexedTokens
    start: int
    stop: int
    seq_length: int
    vocab_size: int
    separate_documents: bool

    def __len__(self) -> int:
        return max(0, (self.stop - self.start - 1) // self.seq_length)

    @property
    def path(self) -> str:
        """The files' prefix."""
        return self.tokens.path

    def order(self, samples: np.ndarray, seed: int) -> np.ndarray:
        """See `RowSource.order`."""
        return sample_at(samples, len(self), seed)[0]

    def materialise(self, row: int, reverse_complement: bool = False) -> Row:
        """Build one row.

        Args:
            row: Index in [0, len(self)).
            reverse_complement: False: tokens have no other strand.

        Raises:
            IndexError: There is no such row.
            DataError: A token is not in the model's vocabulary.
        """
        assert not reverse_complement, "tokens have no other strand"
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        first = self.start + row * self.seq_length
        found = self.tokens.tokens[first : first + self.seq_length + 1].astype(np.int64)
        self._check(found, first)
        inputs, targets = found[:-1], found[1:].copy()
        positions = np.arange(self.seq_length)
        if not self.separate_documents:
            return Row(inputs, targets, positions, np.zeros_like(positions), self.seq_length)
        documents = self.tokens.documents_between(first, first + self.seq_length + 1)
        targets[documents[1:] != documents[:-1]] = IGNORE_INDEX
        documents = documents[:-1]
        positions -= np.searchsorted(documents, documents)
        return Row(inputs, targets, positions, documents, self.seq_length)

    def _check(self, found: np.ndarray, first: int) -> None:
        outside = np.flatnonzero((found < 0) | (found >= self.vocab_size))
        if outside.size:
            at = first + int(outside[0])
            raise DataError(
                f"data.path={self.path}: token {found[outside[0]]} (number {at} of the file, in document "
                f"{self.tokens.document_of(at)}) is not in [0, model.vocab_size={self.vocab_size}). Set "
                "model.vocab_size to that of the tokenizer that made the files."
            )


def split_tokens(
    tokens: IndexedTokens, heldout_fraction: float, *, seq_length: int, vocab_size: int, separate_documents: bool
) -> tuple[TokenRows, TokenRows]:
    """Cut once: what comes before is for training, what comes after is held out.

    Args:
        tokens: All of them.
        heldout_fraction: Share of all tokens, at the end, in [0, 1]. The cut moves to the nearest border between two
            documents, if that changes the held-out part by no more than half of it; else it is inside a document.
        seq_length: Positions of a row.
        vocab_size: Of the model.
        separate_documents: See `TokenRows`.

    Returns:
        The training and the held-out rows; either may have none.
    """
    cut = _cut(tokens, round(tokens.num_tokens * heldout_fraction))

    def rows(start: int, stop: int) -> TokenRows:
        return TokenRows(tokens, start, stop, seq_length, vocab_size, separate_documents)

    return rows(0, cut), rows(cut, tokens.num_tokens)


def _cut(tokens: IndexedTokens, num_heldout: int) -> int:
    exact = tokens.num_tokens - num_heldout
    if not 0 < exact < tokens.num_tokens:
        return exact
    document = tokens.document_of(exact)
    nearest = min((tokens.start_of(document), tokens.start_of(document + 1)), key=lambda border: abs(border - exact))
    is_near = 0 < nearest < tokens.num_tokens and abs(nearest - exact) <= num_heldout / 2
    return nearest if is_near else exact
