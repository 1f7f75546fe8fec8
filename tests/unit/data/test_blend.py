"""Blends: the shares hold in every block, each part goes through its own epochs, and rows are those of the parts."""

import numpy as np
import pytest

from moe_framework.data.blend import BLOCK, BlendedRows, counts_of
from moe_framework.data.order import sample_at
from moe_framework.data.rows import Row, empty_row


class Numbered:
    """Rows that hold their own number."""

    seq_length = 4

    def __init__(self, name: str, length: int):
        self.path, self._length = name, length

    def __len__(self) -> int:
        return self._length

    def order(self, samples: np.ndarray, seed: int) -> np.ndarray:
        return sample_at(samples, self._length, seed)[0]

    def materialise(self, row: int, reverse_complement: bool = False) -> Row:
        assert 0 <= row < self._length
        return empty_row(self.seq_length)._replace(num_tokens=row + 1000 * reverse_complement)


def blend(*weights: float, lengths: tuple[int, ...] = (7, 100, 3000)) -> BlendedRows:
    parts = tuple(Numbered(f"/{number}", length) for number, length in enumerate(lengths[: len(weights)]))
    return BlendedRows(parts, counts_of(weights))


def part_of(rows: np.ndarray, lengths: tuple[int, ...] = (7, 100, 3000)) -> np.ndarray:
    return np.searchsorted(np.cumsum(lengths), rows, side="right")


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ((1.0, 1.0), (500_000, 500_000)),
        ((7.0, 3.0), (700_000, 300_000)),
        ((1.0, 1.0, 1.0), (333_334, 333_333, 333_333)),
        ((1.0, 4e-7), (1_000_000, 0)),
        ((0.5, 0.25, 0.25), (500_000, 250_000, 250_000)),
        ((1e308, 1e308), (500_000, 500_000)),
    ],
)
def test_weights_become_samples_of_a_block(weights: tuple[float, ...], counts: tuple[int, ...]):
    assert counts_of(weights) == counts
    assert sum(counts) == BLOCK


def test_every_block_holds_the_shares_exactly_and_in_an_order_of_its_own():
    rows = blend(0.5, 0.3, 0.2)
    parts = [part_of(rows.order(np.arange(block * BLOCK, (block + 1) * BLOCK), 3)) for block in range(2)]
    assert [np.bincount(block).tolist() for block in parts] == [[500_000, 300_000, 200_000]] * 2
    assert not np.array_equal(parts[0], parts[1])


def test_short_stretches_have_about_the_shares():
    chosen = part_of(blend(0.5, 0.5).order(np.arange(400), 0))
    # Six standard deviations of a fair coin are 60.
    assert abs(int((chosen == 0).sum()) - 200) < 60


def test_each_part_goes_through_epochs_of_its_own():
    rows = blend(0.5, 0.3, 0.2).order(np.arange(BLOCK), 5)
    for part, (offset, length) in enumerate(((0, 7), (7, 100), (107, 3000))):
        times = np.bincount(rows[part_of(rows) == part] - offset, minlength=length)
        drawn = (500_000, 300_000, 200_000)[part]
        assert len(times) == length
        assert set(times.tolist()) <= {drawn // length, drawn // length + 1}


def test_the_samples_of_a_part_are_counted_from_0_without_a_gap():
    asked: list[np.ndarray] = []

    class Recording(Numbered):
        def order(self, samples: np.ndarray, seed: int) -> np.ndarray:
            asked.append(samples)
            return super().order(samples, seed)

    rows = BlendedRows((Recording("/0", 7), Numbered("/1", 9)), counts_of((0.25, 0.75)))
    for block in range(2):
        rows.order(np.arange(block * BLOCK, (block + 1) * BLOCK), 3)
    assert [(numbers.min(), numbers.max(), len(np.unique(numbers))) for numbers in asked] == [
        (0, 249_999, 250_000),
        (250_000, 499_999, 250_000),
    ]


def test_a_sample_is_the_same_whatever_is_asked_beside_it():
    rows = blend(0.5, 0.3, 0.2)
    samples = np.arange(BLOCK - 50, BLOCK + 50)
    together = rows.order(samples, 9)
    assert [int(rows.order(np.array([sample]), 9)[0]) for sample in samples] == together.tolist()
    assert not np.array_equal(rows.order(samples, 10), together)


def test_rows_are_those_of_the_parts():
    rows = blend(1.0, 1.0, 1.0)
    assert len(rows) == 3107
    assert [rows.materialise(row).num_tokens for row in (0, 6, 7, 106, 107, 3106)] == [0, 6, 0, 99, 0, 2999]
    assert rows.materialise(8, True).num_tokens == 1001
    for row in (-1, 3107):
        with pytest.raises(IndexError):
            rows.materialise(row)


def test_equal_parts_are_not_in_the_same_order():
    rows = blend(1.0, 1.0, lengths=(50, 50)).order(np.arange(10_000), 0)
    own = [rows[rows < 50].tolist(), (rows[rows >= 50] - 50).tolist()]
    assert sorted(own[0][:50]) != own[0][:50]
    assert own[0] != own[1]


def test_the_path_names_shares_and_parts():
    assert blend(0.7, 0.3).path == "0.7 /0 0.3 /1"
