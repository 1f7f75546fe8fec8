"""The shuffled order of samples, as arithmetic on the global sample index.

Nothing is stored and nothing is communicated: any rank finds any sample of any epoch from (seed, index), so that
resuming at another world size needs one integer. The permutation is a keyed Feistel network over the smallest
even number of bits that holds the range, walked along its cycle until it falls inside the range.

Source: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 3 and 4 (cycle
walking, Feistel). Mixing function: G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014, figure 17, with the constants of its mix64variant13.
"""

import numpy as np

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_ORDER_STREAM = 0x6F72646572
_STRAND_STREAM = 0x737472616E64


def sample_at(indices: np.ndarray, num_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows that global sample indices stand for.

    Epoch e holds the indices [e · num_rows, (e + 1) · num_rows), and within it each row occurs once.

    Args:
        indices: `[n]` global sample indices, at least 0.
        num_rows: Rows in the data, at least 1.
        seed: Any integer.

    Returns:
        rows: `[n] int64` in [0, num_rows).
        epochs: `[n] int64`.
    """
    assert num_rows >= 1, "an empty data set has no order"
    epochs, slots = np.divmod(np.asarray(indices, dtype=np.int64), num_rows)
    keys = _mix(_stream(seed, _ORDER_STREAM) ^ _mix(epochs.astype(np.uint64) + np.uint64(_GOLDEN)))
    half_bits = max(1, ((num_rows - 1).bit_length() + 1) // 2)
    values = _feistel(slots.astype(np.uint64), keys, half_bits)
    # The domain has under 4 · num_rows values, so an element leaves the range with probability under 3/4.
    outside = np.flatnonzero(values >= num_rows)
    while outside.size:
        values[outside] = _feistel(values[outside], keys[outside], half_bits)
        outside = outside[values[outside] >= num_rows]
    return values.astype(np.int64), epochs


def flip_strand(indices: np.ndarray, seed: int) -> np.ndarray:
    """Decides for each global sample index, with probability one half, to read the other strand.

    A global index names both the epoch and the sample within it, so a row is decided anew in every epoch.

    Args:
        indices: `[n]` global sample indices, at least 0.
        seed: Any integer.

    Returns:
        `[n] bool`.
    """
    values = np.asarray(indices, dtype=np.int64).astype(np.uint64)
    return (_mix(_stream(seed, _STRAND_STREAM) ^ _mix(values + np.uint64(_GOLDEN))) >> np.uint64(63)).astype(bool)


def _stream(seed: int, purpose: int) -> np.ndarray:
    return _mix(np.array([seed % 2**64], dtype=np.uint64) ^ _mix(np.array([purpose], dtype=np.uint64)))


def _feistel(values: np.ndarray, keys: np.ndarray, half_bits: int) -> np.ndarray:
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for number in range(_ROUNDS):
        round_keys = _mix(keys + np.uint64((number + 1) * _GOLDEN % 2**64))
        left, right = right, left ^ (_mix(right ^ round_keys) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
