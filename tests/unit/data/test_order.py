import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_framework.data.order import flip_strand, sample_at

seeds = st.integers(-(2**70), 2**70)


@given(num_rows=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 10**6))
def test_every_epoch_holds_every_row_once(num_rows, seed, epoch):
    rows, epochs = sample_at(np.arange(num_rows) + epoch * num_rows, num_rows, seed)
    assert np.array_equal(np.sort(rows), np.arange(num_rows))
    assert (epochs == epoch).all()


@given(num_rows=st.integers(1, 10**15), seed=seeds, index=st.integers(0, 10**18))
def test_rows_of_a_large_range_stay_in_it(num_rows, seed, index):
    rows, epochs = sample_at(np.array([index]), num_rows, seed)
    assert 0 <= rows[0] < num_rows
    assert epochs[0] == index // num_rows


def test_a_sample_does_not_depend_on_what_is_asked_with_it():
    together, _ = sample_at(np.arange(500), 77, seed=3)
    alone = [int(sample_at(np.array([index]), 77, seed=3)[0][0]) for index in range(500)]
    assert together.tolist() == alone


def test_order_is_fixed_for_ever():
    rows, _ = sample_at(np.arange(12), 10, seed=0)
    assert rows.tolist() == [6, 1, 2, 3, 7, 0, 4, 5, 8, 9, 1, 4]


def test_order_differs_between_epochs_and_seeds():
    orders = [sample_at(np.arange(100) + 100 * epoch, 100, seed)[0] for epoch in range(5) for seed in range(5)]
    for number, one in enumerate(orders):
        for other in orders[:number]:
            # Two independent permutations agree in one place on average (Poisson): 10 is beyond 1e-7.
            assert np.count_nonzero(one == other) < 10


@pytest.mark.parametrize("num_rows", [5, 16, 60])
def test_each_place_gets_each_row_equally_often(num_rows):
    num_epochs = 4000
    rows, _ = sample_at(np.arange(num_epochs * num_rows), num_rows, seed=1)
    table = np.zeros((num_rows, num_rows))
    np.add.at(table, (np.tile(np.arange(num_rows), num_epochs), rows), 1)
    expected = num_epochs / num_rows
    # Rows and columns of the table have fixed sums, so chi-square has (n - 1)^2 degrees of freedom.
    chi_square, freedom = float(((table - expected) ** 2 / expected).sum()), (num_rows - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_are_not_kept_together():
    rows, _ = sample_at(np.arange(10_000), 10_000, seed=2)
    correlation = np.corrcoef(rows[:-1], rows[1:])[0, 1]
    assert abs(correlation) < 5 / np.sqrt(10_000)


def test_strand_is_a_fair_coin_that_depends_on_seed_epoch_and_sample():
    indices = np.arange(40_000)
    flips = flip_strand(indices, seed=0)
    assert flips.dtype == bool
    limit = 5 * 0.5 / np.sqrt(len(indices))
    assert abs(flips.mean() - 0.5) < limit
    assert abs((flips == flip_strand(indices, seed=1)).mean() - 0.5) < limit
    assert abs((flips[1:] == flips[:-1]).mean() - 0.5) < limit
    assert flip_strand(indices[7:9], seed=0).tolist() == flips[7:9].tolist()


def test_strand_is_independent_of_the_order():
    indices = np.arange(40_000)
    first_half = sample_at(indices, len(indices), seed=0)[0] < len(indices) // 2
    assert abs((first_half == flip_strand(indices, seed=0)).mean() - 0.5) < 5 * 0.5 / np.sqrt(len(indices))
