import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_framework.data.fasta import Sequences
from moe_framework.data.loader import FILLER_SAMPLE, TrainLoader, collate, heldout_batches
from moe_framework.data.order import flip_strand, sample_at
from moe_framework.data.packing import Region, build_rows
from moe_framework.data.rows import empty_row
from moe_framework.data.tokenizer import IGNORE_INDEX, PAD, NucleotideTokenizer
from moe_framework.errors import DataError

SEQ_LENGTH = 16


def make_rows(*lengths: int, seq_length: int = SEQ_LENGTH):
    generator = np.random.default_rng(0)
    records = ["".join(generator.choice(list("ACGTN"), length)) for length in lengths]
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    tokens = NucleotideTokenizer().encode("".join(records))
    sequences = Sequences("/memory.fa", tuple(map(str, range(len(records)))), offsets, tokens)
    return build_rows(sequences, Region(0, sequences.num_bases), seq_length)


def make_loader(rows, **changes) -> TrainLoader:
    settings = {
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "data_rank": 0,
        "num_data_ranks": 1,
        "seed": 5,
        "reverse_complement": True,
        "prefetch": 2,
    }
    return TrainLoader(rows, **{**settings, **changes})


def steps(rows, number: int, **changes) -> list:
    with make_loader(rows, **changes) as loader:
        return [loader.next_step() for _ in range(number)]


def ids_of(step) -> list[tuple[int, ...]]:
    return [batch.sample_ids for batch in step]


def assert_same(one, two):
    assert one.sample_ids == two.sample_ids
    assert (one.num_targets, one.num_tokens) == (two.num_targets, two.num_tokens)
    for name in ("tokens", "targets", "positions", "document_ids", "valid_index"):
        left, right = getattr(one, name), getattr(two, name)
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)


def test_a_step_holds_its_micro_batches_by_arithmetic_on_rank_and_index():
    rows = make_rows(300)
    first, second = steps(rows, 2, num_data_ranks=2, data_rank=1)
    assert ids_of(first) == [(2, 3), (6, 7)]
    assert ids_of(second) == [(10, 11), (14, 15)]


@pytest.mark.parametrize(("num_data_ranks", "micro_batch_size"), [(1, 1), (1, 8), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_every_layout_reads_the_same_global_batch(num_data_ranks, micro_batch_size):
    rows = make_rows(300, 7, 9, 30)
    layout = {"num_data_ranks": num_data_ranks, "micro_batch_size": micro_batch_size}
    by_sample = {}
    for rank in range(num_data_ranks):
        for step in steps(rows, 3, data_rank=rank, **layout):
            for batch in step:
                assert batch.tokens.shape == (micro_batch_size, SEQ_LENGTH)
                by_sample.update(zip(batch.sample_ids, batch.tokens.tolist(), strict=True))
    assert sorted(by_sample) == list(range(24))
    for step in steps(rows, 3, micro_batch_size=8):
        for sample, tokens in zip(step[0].sample_ids, step[0].tokens.tolist(), strict=True):
            assert by_sample[sample] == tokens


def test_samples_follow_the_order_and_the_strand_of_seed_and_index():
    rows = make_rows(300)
    (batches,) = steps(rows, 1, micro_batch_size=8, consumed_samples=3 * len(rows) + 4)
    samples = np.array(batches[0].sample_ids)
    numbers, epochs = sample_at(samples, len(rows), 5)
    assert set(epochs.tolist()) == {3}
    expected = [rows.materialise(n, bool(f)) for n, f in zip(numbers.tolist(), flip_strand(samples, 5), strict=True)]
    assert_same(batches[0], collate(expected, batches[0].sample_ids))


def test_without_reverse_complement_only_the_forward_strand_is_read():
    rows = make_rows(300)
    forward = {tuple(rows.materialise(n).tokens.tolist()) for n in range(len(rows))}
    read = [tuple(t) for s in steps(rows, 6, reverse_complement=False) for b in s for t in b.tokens.tolist()]
    assert set(read) <= forward
    flipped = [tuple(t) for s in steps(rows, 6) for b in s for t in b.tokens.tolist()]
    assert not set(flipped) <= forward


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_prefetch_changes_nothing_that_is_read(prefetch):
    rows = make_rows(300, 9)
    for one, two in zip(steps(rows, 4, prefetch=prefetch), steps(rows, 4), strict=True):
        for left, right in zip(one, two, strict=True):
            assert_same(left, right)


def test_position_counts_what_was_handed_out_and_resumes_on_another_layout():
    rows = make_rows(300)
    with make_loader(rows, prefetch=8) as loader:
        for _ in range(3):
            loader.next_step()
        time.sleep(0.05)  # the background thread runs ahead, which must not move the position
        position = loader.consumed_samples
        following = loader.next_step()
    assert position == 24
    resumed = {}
    for rank in range(2):
        (step,) = steps(rows, 1, consumed_samples=position, num_data_ranks=2, data_rank=rank, micro_batch_size=4)
        resumed.update(zip(step[0].sample_ids, step[0].tokens.tolist(), strict=True))
    assert resumed == {s: t for b in following for s, t in zip(b.sample_ids, b.tokens.tolist(), strict=True)}


class EndingRows:
    """Rows that fail from one call on."""

    def __init__(self, rows, error: Exception, after: int):
        self.path, self.seq_length, self.order = rows.path, rows.seq_length, rows.order
        self._rows, self._error, self._left = rows, error, after

    def __len__(self):
        return len(self._rows)

    def materialise(self, row, reverse_complement=False):
        self._left -= 1
        if self._left < 0:
            raise self._error
        return self._rows.materialise(row, reverse_complement)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [StopIteration(), EOFError("gone")])
def test_data_that_ends_early_is_a_data_error_that_names_file_and_rank(error, prefetch):
    rows = EndingRows(make_rows(300), error, after=10)
    with make_loader(rows, prefetch=prefetch, num_data_ranks=2, data_rank=1) as loader:
        loader.next_step()
        loader.next_step()
        with pytest.raises(DataError, match=r"data.path=/memory.fa: data ended early, .* of data rank 1\. "):
            loader.next_step()
        assert loader.consumed_samples == 16


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [DataError("data.path=x: broken. Mend it."), ValueError("a bug")])
def test_other_errors_arrive_as_they_are(error, prefetch):
    with (
        make_loader(EndingRows(make_rows(300), error, after=0), prefetch=prefetch) as loader,
        pytest.raises(type(error)) as caught,
    ):
        loader.next_step()
    assert caught.value is error


def test_an_error_is_raised_again_instead_of_waiting_for_ever():
    with make_loader(EndingRows(make_rows(300), ValueError("a bug"), after=0)) as loader:
        for _ in range(2):
            with pytest.raises(ValueError, match="a bug"):
                loader.next_step()


def test_close_stops_the_thread_at_once_while_the_queue_is_full():
    before = threading.active_count()
    loader = make_loader(make_rows(300), prefetch=1)
    loader.next_step()
    assert threading.active_count() == before + 1
    start = time.perf_counter()
    loader.close()
    loader.close()
    assert threading.active_count() == before
    assert time.perf_counter() - start < 2.0


def test_an_unclosed_loader_does_not_keep_the_process_alive():
    loader = make_loader(make_rows(300))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "data-prefetch"]
    assert thread.daemon
    loader.close()


def test_full_rows_need_neither_documents_nor_an_index():
    rows = make_rows(SEQ_LENGTH * 4 - 1)
    batch = collate([rows.materialise(n) for n in range(3)], (0, 1, 2))
    assert batch.document_ids is None
    assert batch.valid_index is None
    assert batch.num_tokens == batch.tokens.numel() == 3 * SEQ_LENGTH
    assert batch.num_targets == int((batch.targets != IGNORE_INDEX).sum()) < batch.num_tokens


def test_trailing_padding_needs_an_index_but_no_documents():
    rows = make_rows(5)
    batch = collate([rows.materialise(0)] * 2, (0, 1))
    assert batch.document_ids is None
    assert batch.valid_index is not None
    assert batch.valid_index.tolist() == [*range(6), *range(SEQ_LENGTH, SEQ_LENGTH + 6)]
    assert batch.valid_index.dtype == torch.int64
    assert batch.num_tokens == 12


def test_packed_rows_carry_their_documents():
    rows = make_rows(5, 6)
    batch = collate([rows.materialise(0)], (0,))
    assert batch.document_ids is not None
    assert batch.document_ids.unique().tolist() == [-1, 0, 1]
    for name in ("tokens", "targets", "positions", "document_ids"):
        assert getattr(batch, name).dtype == torch.int64


def test_moving_a_batch_keeps_what_it_holds():
    batch = collate([make_rows(5, 6).materialise(0), empty_row(SEQ_LENGTH)], (0, FILLER_SAMPLE))
    assert_same(batch.to("cpu"), batch)
    moved = replace(batch, document_ids=None).to("meta")
    assert (moved.tokens.device.type, moved.document_ids) == ("meta", None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batch_moves_to_cuda():
    batch = collate([make_rows(5, 6).materialise(0)], (0,))
    assert_same(batch.to("cuda").to("cpu"), batch)


@pytest.mark.parametrize(("num_data_ranks", "micro_batch_size"), [(1, 1), (1, 4), (2, 3), (4, 2), (32, 1)])
def test_heldout_ranks_yield_equally_many_batches_and_cover_each_row_once(num_data_ranks, micro_batch_size):
    rows = make_rows(300)
    layout = {"num_data_ranks": num_data_ranks, "micro_batch_size": micro_batch_size}
    per_rank = [list(heldout_batches(rows, data_rank=rank, **layout)) for rank in range(num_data_ranks)]
    assert len({len(batches) for batches in per_rank}) == 1
    batches = [batch for rank in per_rank for batch in rank]
    assert {batch.tokens.shape for batch in batches} == {(micro_batch_size, SEQ_LENGTH)}
    ids = [sample for batch in batches for sample in batch.sample_ids]
    assert sorted(s for s in ids if s != FILLER_SAMPLE) == list(range(len(rows)))
    assert sum(batch.num_tokens for batch in batches) == 301
    for batch in batches:
        for sample, tokens in zip(batch.sample_ids, batch.tokens.tolist(), strict=True):
            assert tokens == (
                [PAD] * SEQ_LENGTH if sample == FILLER_SAMPLE else rows.materialise(sample).tokens.tolist()
            )


def test_rank_without_heldout_rows_gets_batches_of_padding():
    (batch,) = heldout_batches(make_rows(SEQ_LENGTH - 1), micro_batch_size=2, data_rank=1, num_data_ranks=2)
    assert (batch.num_tokens, batch.num_targets, batch.document_ids) == (0, 0, None)
    assert batch.valid_index is not None
    assert batch.valid_index.shape == (0,)
    assert batch.valid_index.dtype == torch.int64


def test_limited_heldout_rows_are_spread_evenly_and_the_same_at_every_layout():
    rows = make_rows(SEQ_LENGTH * 40)
    (whole,) = heldout_batches(rows, micro_batch_size=4, data_rank=0, num_data_ranks=1, max_rows=4)
    assert np.diff(whole.sample_ids).tolist() in ([10, 10, 10], [10, 10, 11], [10, 11, 10], [11, 10, 10])
    shares = [
        next(heldout_batches(rows, micro_batch_size=2, data_rank=rank, num_data_ranks=2, max_rows=4)) for rank in (0, 1)
    ]
    assert shares[0].sample_ids + shares[1].sample_ids == whole.sample_ids
    everything = list(heldout_batches(rows, micro_batch_size=1, data_rank=0, num_data_ranks=1, max_rows=10**9))
    assert len(everything) == len(rows)
