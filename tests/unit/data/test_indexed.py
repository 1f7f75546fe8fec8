"""Megatron-Core's token files: what is read, and every way in which two files can be wrong."""

import struct
from pathlib import Path

import numpy as np
import pytest

from moe_framework.data.indexed import HEADER, indexed_prefix, read_indexed
from moe_framework.errors import DataError
from tests.helpers.token_files import write_token_files

DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [[7, 8, 9, 10]]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "text"


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "uint16"])
def test_tokens_of_every_type_and_the_borders_of_documents_are_read(prefix: Path, dtype: str):
    tokens = write_token_files(prefix, DOCUMENTS, dtype)
    read = read_indexed(str(prefix))
    assert read.tokens.tolist() == tokens
    assert (read.num_tokens, read.num_documents) == (10, 3)
    assert [read.start_of(document) for document in range(4)] == [0, 4, 6, 10]
    assert [read.document_of(token) for token in range(10)] == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]


def test_a_token_as_large_as_the_type_can_hold_keeps_its_value(prefix: Path):
    write_token_files(prefix, [[[65535, 0]]], "uint16")
    assert read_indexed(str(prefix)).tokens.tolist() == [65535, 0]


@pytest.mark.parametrize("seed", range(5))
def test_the_documents_of_a_window_are_those_of_its_tokens(prefix: Path, seed: int):
    rng = np.random.default_rng(seed)
    # Documents of no sequence and sequences of no token, also first and last.
    documents = [[[1] * int(n) for n in rng.integers(0, 4, rng.integers(0, 3))] for _ in range(20)]
    documents = [[], [[]], *documents, [[1, 1]], [[]], []]
    write_token_files(prefix, documents)
    read = read_indexed(str(prefix))
    owner = [number for number, document in enumerate(documents) for sequence in document for _ in sequence]
    for start in range(len(owner)):
        for stop in range(start + 1, len(owner) + 1):
            numbers = read.documents_between(start, stop)
            expected = np.unique(owner[start:stop], return_inverse=True)[1]
            assert numbers.tolist() == expected.tolist()


def test_nothing_is_copied(prefix: Path):
    write_token_files(prefix, DOCUMENTS)
    read = read_indexed(str(prefix))
    assert all(isinstance(array, np.memmap) for array in (read.tokens, read.pointers, read.documents))


@pytest.mark.parametrize(
    ("name", "expected"), [("text", "text"), ("text.bin", "text"), ("text.idx", "text"), ("other.fa", None)]
)
def test_a_prefix_or_either_file_names_the_pair(tmp_path: Path, name: str, expected: str | None):
    write_token_files(tmp_path / "text", DOCUMENTS)
    found = indexed_prefix(str(tmp_path / name))
    assert found == (None if expected is None else str(tmp_path / expected))


def test_a_fasta_file_beside_token_files_of_its_name_is_itself(tmp_path: Path):
    (tmp_path / "genome").write_text(">a\nACGT\n")
    write_token_files(tmp_path / "genome", DOCUMENTS)
    assert indexed_prefix(str(tmp_path / "genome")) is None


def fingerprint(prefix: Path) -> str:
    return read_indexed(str(prefix)).fingerprint


def test_fingerprints_differ_with_tokens_borders_and_type_and_not_with_the_place(tmp_path: Path):
    variants = {
        "first": (DOCUMENTS, "uint16"),
        "token": ([[[1, 2, 3], [4]], [[5, 6]], [[7, 8, 9, 11]]], "uint16"),
        "border": ([[[1, 2, 3], [4], [5, 6]], [[7, 8, 9, 10]]], "uint16"),
        "other border": ([[[1, 2, 3], [4]], [[5]], [[6, 7, 8, 9, 10]]], "uint16"),
        "sequence of another document": ([[[1, 2, 3]], [[4], [5, 6]], [[7, 8, 9, 10]]], "uint16"),
        "type": (DOCUMENTS, "int32"),
    }
    found = {}
    for name, (documents, dtype) in variants.items():
        write_token_files(tmp_path / name, documents, dtype)
        found[name] = fingerprint(tmp_path / name)
    assert len(set(found.values())) == len(found)
    write_token_files(tmp_path / "again", DOCUMENTS)
    assert fingerprint(tmp_path / "again") == found["first"]


def changed_header(prefix: Path, place: int, value: int | bytes) -> None:
    file = Path(f"{prefix}.idx")
    content = file.read_bytes()
    fields = list(HEADER.unpack(content[: HEADER.size]))
    fields[place] = value
    file.write_bytes(HEADER.pack(*fields) + content[HEADER.size :])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"something", "is no index of token files"),
        (1, 2, "has version 2 and type 8, which cannot be read"),
        (2, 7, "has version 1 and type 7, which cannot be read"),
        (3, 2**40, "bytes. Copy both files again"),
        (4, 3, "its documents are not made of its sequences"),
    ],
)
def test_an_index_of_something_else_is_refused(prefix: Path, place: int, value: int | bytes, message: str):
    write_token_files(prefix, DOCUMENTS)
    changed_header(prefix, place, value)
    with pytest.raises(DataError, match=message) as caught:
        read_indexed(str(prefix))
    assert str(caught.value).startswith(f"data.path={prefix}: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-2], r"text\.bin has 18 of 20 bytes"),
        (lambda content: content + b"xx", r"text\.bin has 22 of 20 bytes"),
        (lambda content: content[:-1], "ends within a token"),
        (lambda _: b"", r"text\.bin has 0 of 20 bytes"),
    ],
)
def test_tokens_that_do_not_fit_their_index_are_refused(prefix: Path, change, message: str):
    write_token_files(prefix, DOCUMENTS)
    file = Path(f"{prefix}.bin")
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError, match=message):
        read_indexed(str(prefix))


def test_an_index_that_was_cut_off_is_refused(prefix: Path):
    write_token_files(prefix, DOCUMENTS)
    file = Path(f"{prefix}.idx")
    whole = file.read_bytes()
    for length in (0, 8, HEADER.size - 1, HEADER.size, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"is no index of token files|of \d+ bytes"):
            read_indexed(str(prefix))


def test_sequences_with_a_gap_between_them_are_refused(prefix: Path):
    write_token_files(prefix, DOCUMENTS)
    file = Path(f"{prefix}.idx")
    content = bytearray(file.read_bytes())
    second_pointer = HEADER.size + 4 * 4 + 8
    content[second_pointer : second_pointer + 8] = struct.pack("<q", 8)
    file.write_bytes(bytes(content))
    with pytest.raises(DataError, match="its sequences do not follow each other"):
        read_indexed(str(prefix))


def test_a_missing_file_is_named(prefix: Path):
    write_token_files(prefix, DOCUMENTS)
    Path(f"{prefix}.idx").unlink()
    assert indexed_prefix(str(prefix)) == str(prefix)
    with pytest.raises(DataError, match=r"no file .*text\.idx\. Make the files with tools/prepare_text\.py"):
        read_indexed(str(prefix))


def test_files_without_documents_are_refused(prefix: Path):
    write_token_files(prefix, [])
    with pytest.raises(DataError, match="it holds no sequence"):
        read_indexed(str(prefix))
