import math
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_framework.data.fasta import Sequences
from moe_framework.data.packing import Region, build_rows, pack, split_regions
from moe_framework.data.rows import PADDING_DOCUMENT
from moe_framework.data.tokenizer import BOS, EOS, IGNORE_INDEX, PAD, A, N, NucleotideTokenizer


def sequences_of(*records: str) -> Sequences:
    offsets = np.cumsum([0, *map(len, records)]).astype(np.int64)
    tokens = NucleotideTokenizer().encode("".join(records))
    return Sequences("memory", tuple(f"r{i}" for i in range(len(records))), offsets, tokens)


def whole(sequences: Sequences) -> Region:
    return Region(0, sequences.num_bases)


def documents(rows) -> list[list[int]]:
    """The inputs of all windows, as token lists."""
    found = []
    for index in range(len(rows)):
        row = rows.materialise(index)
        numbers = range(int(row.document_ids.max()) + 1)
        found += [row.tokens[row.document_ids == number].tolist() for number in numbers]
    return found


def tokens_of(text: str) -> list[int]:
    special = {"^": BOS, "$": EOS}
    return [special[c] if c in special else int(NucleotideTokenizer().encode(c)[0]) for c in text]


records_of_genomes = st.lists(st.text("ACGTN", min_size=2, max_size=40), min_size=1, max_size=8)


def test_short_records_are_packed_into_one_row_as_documents():
    row = build_rows(*_with_region(sequences_of("ACG", "TNA")), seq_length=10).materialise(0)
    assert row.tokens.tolist() == [*tokens_of("^ACG^TNA"), PAD, PAD]
    ignored = IGNORE_INDEX
    assert row.targets.tolist() == [*tokens_of("ACG"), ignored, *tokens_of("T"), ignored, A, ignored, ignored, ignored]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 0]
    assert row.document_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, PADDING_DOCUMENT, PADDING_DOCUMENT]
    assert row.num_tokens == 8
    assert {array.dtype for array in row[:4]} == {np.dtype(np.int64)}


def test_windows_of_a_long_record_share_the_one_token_that_is_target_then_input():
    rows = build_rows(*_with_region(sequences_of("ACGTACGTAC")), seq_length=4)
    assert documents(rows) == [tokens_of("^ACG"), tokens_of("TACG"), tokens_of("TAC")]
    assert rows.materialise(0).targets.tolist() == tokens_of("ACGT")


def test_stride_repeats_that_many_tokens_and_adds_no_window_without_a_new_one():
    # 12 tokens: windows of 5 advance by 2 and end exactly at the 11th, so a fifth one holds the last token.
    rows = build_rows(*_with_region(sequences_of("ACGTACGTAC")), seq_length=4, stride=2)
    assert sorted(rows.window_start.tolist()) == [0, 2, 4, 6, 8]
    rows = build_rows(*_with_region(sequences_of("ACGTACGTA")), seq_length=4, stride=2)
    assert sorted(rows.window_start.tolist()) == [0, 2, 4, 6]


def test_record_that_fits_exactly_is_one_full_window():
    rows = build_rows(*_with_region(sequences_of("ACG")), seq_length=4)
    assert documents(rows) == [tokens_of("^ACG")]
    assert rows.materialise(0).num_tokens == 4


@given(records=records_of_genomes, seq_length=st.integers(2, 17), cut=st.floats(0, 1))
def test_with_stride_zero_every_known_base_is_a_target_once(records, seq_length, cut):
    sequences = sequences_of(*records)
    for region in split_regions(sequences, cut):
        rows = build_rows(sequences, region, seq_length)
        found = Counter()
        for index in range(len(rows)):
            row = rows.materialise(index)
            found.update(row.targets[row.targets != IGNORE_INDEX].tolist())
        first = region.start + (region.start not in sequences.offsets)
        expected = sequences.tokens[first : region.stop]
        assert found == Counter(expected[expected > N].tolist())


@given(records=records_of_genomes, seq_length=st.integers(2, 17), data=st.data())
def test_windows_overlap_by_the_stride_and_rebuild_each_record(records, seq_length, data):
    stride = data.draw(st.integers(0, seq_length - 1))
    sequences = sequences_of(*records)
    rows = build_rows(*_with_region(sequences), seq_length=seq_length, stride=stride)
    for record, bases in enumerate(records):
        mine = np.flatnonzero(rows.window_record == record)
        starts, stops = rows.window_start[mine], rows.window_stop[mine]
        assert starts[0] == 0
        assert stops[-1] == len(bases) + 2
        assert (stops - starts <= seq_length + 1).all()
        assert (stops - starts >= 2).all()
        assert (stops[:-1] - starts[1:] == stride + 1).all()
        assert (np.diff(stops) > 0).all()


@given(records=records_of_genomes, seq_length=st.integers(2, 17))
def test_rows_hold_each_window_once_and_never_overflow(records, seq_length):
    rows = build_rows(*_with_region(sequences_of(*records)), seq_length=seq_length)
    assert sorted(rows.row_windows.tolist()) == list(range(len(rows.window_record)))
    for index in range(len(rows)):
        row = rows.materialise(index)
        assert 0 < row.num_tokens <= seq_length
        assert (row.document_ids[: row.num_tokens] >= 0).all()
        assert (row.document_ids[row.num_tokens :] == PADDING_DOCUMENT).all()
        assert (row.tokens[row.num_tokens :] == PAD).all()
        starts = np.flatnonzero(np.diff(row.document_ids[: row.num_tokens], prepend=-1))
        assert (row.positions[starts] == 0).all()
        assert row.positions.sum() == sum(math.comb(n, 2) for n in np.diff(np.append(starts, row.num_tokens)).tolist())


@given(bases=st.text("ACGTN", min_size=2, max_size=30), seq_length=st.integers(2, 40))
def test_reverse_complement_row_equals_the_forward_row_of_the_other_strand(bases, seq_length):
    other = bases[::-1].translate(str.maketrans("ACGT", "TGCA"))
    seq_length = max(seq_length, len(bases) + 1)
    flipped = build_rows(*_with_region(sequences_of(bases)), seq_length=seq_length).materialise(0, True)
    forward = build_rows(*_with_region(sequences_of(other)), seq_length=seq_length).materialise(0)
    for one, two in zip(flipped, forward, strict=True):
        assert np.array_equal(one, two)


def test_reverse_complement_of_an_inner_window_has_no_special_token():
    rows = build_rows(*_with_region(sequences_of("ACGTTTGACC")), seq_length=4)
    row = rows.materialise(1, True)
    # Window TTTGA is read as TCAAA; the last of them is a target only.
    assert row.tokens.tolist() == tokens_of("TCAA")
    assert row.targets.tolist() == tokens_of("CAAA")


def test_heldout_cut_is_no_end_of_the_sequence():
    sequences = sequences_of("ACGT", "CCGGTTAACC")
    train, heldout = split_regions(sequences, 0.5)
    assert (train, heldout) == (Region(0, 7), Region(7, 14))
    assert documents(build_rows(sequences, train, 20)) == [tokens_of("^ACGT"), tokens_of("^CC")]
    assert documents(build_rows(sequences, heldout, 20)) == [tokens_of("GTTAACC")]
    assert build_rows(sequences, heldout, 20).materialise(0).targets[:7].tolist() == [*tokens_of("TTAACC"), -100]


def test_heldout_cut_between_records_keeps_both_ends():
    sequences = sequences_of("ACGT", "CCGG")
    train, heldout = split_regions(sequences, 0.5)
    assert documents(build_rows(sequences, train, 20)) == [tokens_of("^ACGT")]
    assert documents(build_rows(sequences, heldout, 20)) == [tokens_of("^CCGG")]


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_empty_region_has_no_rows(fraction):
    sequences = sequences_of("ACGTACGT")
    assert sorted(len(build_rows(sequences, region, 4)) for region in split_regions(sequences, fraction)) == [0, 3]


def test_lone_token_between_two_cuts_gives_no_row():
    assert len(build_rows(sequences_of("ACGTACGT"), Region(3, 4), 4)) == 0


def test_rows_outside_the_range_are_refused():
    rows = build_rows(*_with_region(sequences_of("ACGT")), seq_length=4)
    for index in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows.materialise(index)


@given(sizes=st.lists(st.integers(1, 20), max_size=60), capacity=st.integers(20, 30))
def test_packing_fills_rows_within_the_best_fit_bound(sizes, capacity):
    row_of_window = pack(np.array(sizes, dtype=np.int64), capacity)
    used = np.bincount(row_of_window, weights=sizes)
    assert (used <= capacity).all()
    assert (used > 0).all()
    # Two rows that both fit in one would mean that the second was opened without need.
    assert len(used) < 2 or np.sort(used)[:2].sum() > capacity
    firsts = [int(np.flatnonzero(row_of_window == row)[0]) for row in range(len(used))]
    assert firsts == sorted(firsts)


def test_packing_puts_a_window_where_it_fits_best():
    assert pack(np.array([6, 7, 3]), 10).tolist() == [0, 1, 1]
    assert pack(np.array([7, 6, 3]), 10).tolist() == [0, 1, 0]


def test_packing_time_grows_linearly():
    sizes = np.random.default_rng(0).integers(1, 1025, 100_000)
    start = time.perf_counter()
    rows = pack(sizes, 1024)
    assert time.perf_counter() - start < 5.0  # measured 0.1 s; a quadratic packer needs minutes
    assert sizes.sum() / 1024 / (rows.max() + 1) > 0.99


def _with_region(sequences: Sequences) -> tuple[Sequences, Region]:
    return sequences, whole(sequences)
