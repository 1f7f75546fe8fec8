"""Markov models of the genome: the baselines that a trained model must beat.

An order-k model predicts a base from the k bases before it, by how often that happened in the training region.
Both fitting and scoring need only counts of short words, so that a genome is read once, in chunks.
"""

from collections.abc import Iterator

import numpy as np

from moe_framework.data.fasta import Sequences
from moe_framework.data.packing import Region
from moe_framework.data.tokenizer import A

PSEUDO_COUNT = 1.0
"""Added to the count of each of the four bases in every context: a uniform prior (Laplace's rule)."""

_CHUNK_BASES = 1 << 20


def markov_losses(
    sequences: Sequences, train_region: Region, heldout_region: Region, max_order: int = 8
) -> dict[int, float]:
    """Fits Markov models of each order on the training region and scores them on the held-out region.

    All orders are scored on the same bases, which are also the targets of `build_rows` with stride 0: every A, C,
    G and T of the held-out region, except a first base that follows the cut directly. A context never crosses the
    end of a record, the cut, or another base than A, C, G and T; where fewer than k bases of context exist, the
    order-k model falls back to the longest order that they suffice for. Both regions are read on the forward strand.

    Args:
        sequences: All records.
        train_region: Bases to count.
        heldout_region: Bases to score; at least one target.
        max_order: Largest order, at most 14; a table has 8 · 4^(max_order + 1) bytes, and there are a few.

    Returns:
        Mean loss of each order 0 … max_order, in nats per base.
    """
    assert 0 <= max_order <= 14, "words are packed into 32 bits"
    fitted = _count_words(sequences, train_region, max_order, skip_unconditioned=False)
    scored = _count_words(sequences, heldout_region, max_order, skip_unconditioned=True)
    negative_log_probs = []
    for order in range(max_order + 1):
        # A word with more context than the model looks at counts for its last order + 1 bases.
        counts = np.full((4**order, 4), PSEUDO_COUNT)
        for words in fitted[order:]:
            counts += _last_bases(words, order)
        negative_log_probs.append(np.log(counts.sum(axis=1, keepdims=True) / counts).reshape(-1))
    num_targets = sum(int(words.sum()) for words in scored)
    losses = {}
    for order in range(max_order + 1):
        total = 0.0
        for context, words in enumerate(scored):
            used = min(order, context)
            total += float(_last_bases(words, used).reshape(-1) @ negative_log_probs[used])
        losses[order] = total / num_targets
    return losses


def _last_bases(words: np.ndarray, order: int) -> np.ndarray:
    """Returns counts `[4^order contexts, 4 bases]` of the last order + 1 bases of longer words."""
    return words.reshape(-1, 4**order, 4).sum(axis=0)


def _count_words(sequences: Sequences, region: Region, max_order: int, *, skip_unconditioned: bool) -> list[np.ndarray]:
    """Counts each base with the context that it has.

    Returns:
        For c = 0 … max_order, `[4^(c + 1)] int64`: how often each word of c context bases and a base occurs, over the
        bases that have c bases of context, or c or more for the last. The first base is the highest digit.
    """
    counts = [np.zeros(4 ** (context + 1), dtype=np.int64) for context in range(max_order + 1)]
    for codes, contexts in _chunks(sequences, region, max_order, skip_unconditioned):
        counts[-1] += np.bincount(codes[contexts == max_order], minlength=len(counts[-1]))
        short = np.flatnonzero((contexts >= 0) & (contexts < max_order))
        for context, total in enumerate(counts[:-1]):
            words = codes[short[contexts[short] == context]] & (len(total) - 1)
            total += np.bincount(words, minlength=len(total))
    return counts


def _chunks(
    sequences: Sequences, region: Region, max_order: int, skip_unconditioned: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields, for the bases of each chunk, the word that ends there and its context (-1: not a base to count)."""
    starts = sequences.offsets[:-1]
    for begin in range(region.start, region.stop, _CHUNK_BASES):
        end = min(begin + _CHUNK_BASES, region.stop)
        low = max(region.start, begin - max_order)
        tokens = sequences.tokens[low:end]
        known = tokens >= A
        position = np.arange(len(tokens))
        # Context starts anew at a record's start and after an unknown base.
        run_start = np.where(known, 0, position + 1)
        first, last = np.searchsorted(starts, (low, end))
        run_start[starts[first:last] - low] = np.maximum(run_start[starts[first:last] - low], starts[first:last] - low)
        contexts = np.minimum(position - np.maximum.accumulate(run_start), max_order)
        contexts[~known] = -1
        if skip_unconditioned and begin == region.start and region.start not in starts:
            contexts[0] = -1
        digits = np.where(known, tokens - A, 0).astype(np.int32)
        codes = digits.copy()
        for distance in range(1, max_order + 1):
            codes[distance:] |= digits[:-distance] << (2 * distance)
        yield codes[begin - low :], contexts[begin - low :]
