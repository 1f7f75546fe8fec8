"""Rows of token files: every token is a target once, documents stay apart or do not, and the cut is between them."""

from pathlib import Path

import numpy as np
import pytest

from moe_framework.data.indexed import read_indexed
from moe_framework.data.token_rows import TokenRows, split_tokens
from moe_framework.data.tokenizer import IGNORE_INDEX
from moe_framework.errors import DataError
from tests.helpers.token_files import write_token_files

SEQ_LENGTH = 8
# Tokens are their own place in the file, so that rows show where they are from.
LENGTHS = (3, 1, 10, 8, 2, 16, 5)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    numbers = iter(range(sum(LENGTHS)))
    write_token_files(tmp_path / "text", [[[next(numbers) for _ in range(length)]] for length in LENGTHS])
    return tmp_path / "text"


def rows_of(
    prefix: Path, *, fraction: float = 0.0, separate: bool = True, vocab: int = 100
) -> tuple[TokenRows, TokenRows]:
    return split_tokens(
        read_indexed(str(prefix)), fraction, seq_length=SEQ_LENGTH, vocab_size=vocab, separate_documents=separate
    )


@pytest.mark.parametrize("separate", [False, True])
def test_rows_go_through_all_tokens_and_the_target_is_the_next_token(prefix: Path, separate: bool):
    rows, _ = rows_of(prefix, separate=separate)
    assert len(rows) == (sum(LENGTHS) - 1) // SEQ_LENGTH == 5
    read = [rows.materialise(row) for row in range(len(rows))]
    assert np.concatenate([row.tokens for row in read]).tolist() == list(range(40))
    last_of_document = set((np.cumsum(LENGTHS) - 1).tolist())
    for place, target in enumerate(np.concatenate([row.targets for row in read]).tolist()):
        across = separate and place in last_of_document
        assert target == (IGNORE_INDEX if across else place + 1)
    assert all(row.num_tokens == SEQ_LENGTH for row in read)


def test_separate_documents_have_ids_and_positions_of_their_own(prefix: Path):
    rows, _ = rows_of(prefix)
    first, second = rows.materialise(0), rows.materialise(1)
    assert first.document_ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert first.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    # It begins inside a document, whose rest counts from 0.
    assert second.document_ids.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert second.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def test_a_stream_is_one_document(prefix: Path):
    rows, _ = rows_of(prefix, separate=False)
    row = rows.materialise(0)
    assert row.document_ids.tolist() == [0] * SEQ_LENGTH
    assert row.positions.tolist() == list(range(SEQ_LENGTH))


def test_a_border_after_the_last_input_takes_its_target_away(tmp_path: Path):
    write_token_files(tmp_path / "text", [[list(range(SEQ_LENGTH))], [[90] * SEQ_LENGTH]])
    rows, _ = rows_of(tmp_path / "text")
    row = rows.materialise(0)
    assert row.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, IGNORE_INDEX]
    assert row.document_ids.tolist() == [0] * SEQ_LENGTH


# Documents begin at 0, 3, 4, 14, 22, 24 and 40 of 45 tokens.
@pytest.mark.parametrize(
    ("fraction", "first_heldout"),
    [
        (0.1, 40),  # exactly there is 41
        (0.13, 40),  # 39: the border after it is nearer
        (0.2, 40),  # 36: 4 of 9 tokens less
        (0.25, 34),  # either border would change it by more than half
        (0.4, 24),  # 27
        (0.5, 22),  # 23: of two borders as near, the first
        (0.98, 1),  # the nearest border is the beginning
    ],
)
def test_the_cut_is_at_the_nearest_border_that_keeps_the_share(prefix: Path, fraction: float, first_heldout: int):
    train, heldout = rows_of(prefix, fraction=fraction)
    assert (train.start, train.stop) == (0, first_heldout)
    assert (heldout.start, heldout.stop) == (first_heldout, sum(LENGTHS))


@pytest.mark.parametrize("lengths", [(100, 9900), (9900, 100), (5000, 5000), (10000,), tuple([10] * 1000)])
@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3])
def test_the_heldout_part_is_never_more_than_half_off(tmp_path: Path, lengths: tuple[int, ...], fraction: float):
    write_token_files(tmp_path / "text", [[[1] * length] for length in lengths])
    _, heldout = rows_of(tmp_path / "text", fraction=fraction)
    assert 0.5 <= (heldout.stop - heldout.start) / (10000 * fraction) <= 1.5


def test_heldout_rows_have_tokens_that_training_never_sees(prefix: Path):
    train, heldout = rows_of(prefix, fraction=0.5)
    seen = {int(t) for row in range(len(train)) for t in train.materialise(row).tokens}
    seen |= {int(t) for row in range(len(train)) for t in train.materialise(row).targets}
    held = {int(t) for row in range(len(heldout)) for t in heldout.materialise(row).tokens}
    assert held
    assert not seen & held


def test_each_row_comes_once_in_an_epoch(prefix: Path):
    rows, _ = rows_of(prefix)
    epochs = rows.order(np.arange(3 * len(rows)), 7).reshape(3, -1).tolist()
    assert [sorted(epoch) for epoch in epochs] == [list(range(len(rows)))] * 3


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_that_is_not_there_is_an_index_error(prefix: Path, row: int):
    rows, _ = rows_of(prefix)
    with pytest.raises(IndexError):
        rows.materialise(row)


def test_a_token_outside_of_the_vocabulary_names_token_place_and_document(prefix: Path):
    rows, _ = rows_of(prefix, vocab=20)
    rows.materialise(0)
    with pytest.raises(
        DataError, match=r"token 20 \(number 20 of the file, in document 3\) is not in \[0, model\.vocab"
    ):
        rows.materialise(2)
    # Also where it is a target only.
    with pytest.raises(DataError, match="token 16 "):
        rows_of(prefix, vocab=16)[0].materialise(1)


def test_a_negative_token_is_refused(tmp_path: Path):
    write_token_files(tmp_path / "text", [[[1, -3, *[2] * SEQ_LENGTH]]], "int32")
    rows, _ = rows_of(tmp_path / "text")
    with pytest.raises(DataError, match=r"token -3 \(number 1 of the file"):
        rows.materialise(0)


@pytest.mark.parametrize(("length", "num_rows"), [(8, 0), (9, 1), (16, 1), (17, 2)])
def test_a_row_needs_one_token_more_for_its_last_target(tmp_path: Path, length: int, num_rows: int):
    write_token_files(tmp_path / "text", [[list(range(length))]])
    assert len(rows_of(tmp_path / "text")[0]) == num_rows
