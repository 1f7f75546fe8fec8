import errno
import itertools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moe_framework.data import indexed_writer
from moe_framework.data.indexed import read_indexed
from moe_framework.data.indexed_writer import IndexedWriter
from moe_framework.errors import DataError

DOCUMENTS = [[5, 0, 9], [7], [1, 2, 3, 4, 99]]


def write(prefix: Path, documents: Sequence[Sequence[int]] = DOCUMENTS, vocab_size: int = 100, **options: bool) -> None:
    with IndexedWriter(prefix, vocab_size, **options) as writer:
        for document in documents:
            writer.add(np.array(document, dtype=np.int64))


def write_described(prefix: Path) -> None:
    with IndexedWriter(prefix, 100, overwrite=True) as writer:
        writer.add(np.array([1]))
        writer.describe({"tokens": 1})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("vocab_size", "code", "letter", "itemsize"),
    [(100, 8, "H", 2), (65_499, 8, "H", 2), (65_500, 4, "i", 4), (2**31, 4, "i", 4)],
)
def test_files_are_those_of_the_format(tmp_path: Path, vocab_size: int, code: int, letter: str, itemsize: int):
    write(tmp_path / "text", vocab_size=vocab_size)
    tokens = [token for document in DOCUMENTS for token in document]
    assert (tmp_path / "text.bin").read_bytes() == struct.pack(f"<9{letter}", *tokens)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 3, 4)
    lengths, offsets, documents = [3, 1, 5], [0, 3 * itemsize, 4 * itemsize], [0, 1, 2, 3]
    expected = header + struct.pack("<3i", *lengths) + struct.pack("<3q", *offsets) + struct.pack("<4q", *documents)
    assert (tmp_path / "text.idx").read_bytes() == expected
    assert names(tmp_path) == ["text.bin", "text.idx"]


def test_largest_token_of_each_type_comes_back(tmp_path: Path):
    for vocab_size in (65_499, 2**31):
        write(tmp_path / str(vocab_size), [[0, vocab_size - 1]], vocab_size)
        assert read_indexed(str(tmp_path / str(vocab_size))).tokens.tolist() == [0, vocab_size - 1]


def test_documents_over_several_blocks_of_the_index_are_as_over_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 100, size).tolist() for size in draw.integers(1, 9, 23)]
    write(tmp_path / "one", documents)
    for block in (1, 4, 23, 24):
        monkeypatch.setattr(indexed_writer, "_BLOCK", block)
        write(tmp_path / "several", documents, overwrite=True)
        assert (tmp_path / "several.idx").read_bytes() == (tmp_path / "one.idx").read_bytes()
    read = read_indexed(str(tmp_path / "several"))
    starts = [read.start_of(document) for document in range(24)]
    assert [read.tokens[a:b].tolist() for a, b in itertools.pairwise(starts)] == documents


def test_lengths_are_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(indexed_writer, "_BLOCK", 10)
    with IndexedWriter(tmp_path / "text", 100) as writer:
        for _ in range(1000):
            writer.add(np.array([1]))
            assert len(writer._lengths) < 10


MEGATRON_READS = """
import json, sys
sys.modules["nvidia_resiliency_ext"] = None  # 0.4 lacks a version, on which Megatron-Core 0.19 fails
try:
    from megatron.core.datasets.indexed_dataset import IndexedDataset
except ImportError as error:
    print(json.dumps(str(error)))
    sys.exit()
found = []
for prefix in sys.argv[1:]:
    dataset = IndexedDataset(prefix)
    documents = [dataset[index].tolist() for index in range(len(dataset))]
    found.append([documents, dataset.document_indices.tolist(), dataset[0].dtype.name])
print(json.dumps(found))
"""


@pytest.mark.slow  # it imports Megatron-Core, in a process of its own because of what that leaves behind
def test_megatron_core_reads_the_same_documents(tmp_path: Path):
    vocab_sizes = (100, 100_000)
    prefixes = [tmp_path / str(vocab_size) for vocab_size in vocab_sizes]
    for prefix, vocab_size in zip(prefixes, vocab_sizes, strict=True):
        write(prefix, [*DOCUMENTS, [vocab_size - 1]], vocab_size)
    command = [sys.executable, "-W", "ignore", "-c", MEGATRON_READS, *map(str, prefixes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    found = json.loads(done.stdout)
    if isinstance(found, str):
        pytest.skip(f"megatron-core cannot be imported ({found})")
    assert found == [
        [[*DOCUMENTS, [99]], [0, 1, 2, 3, 4], "uint16"],
        [[*DOCUMENTS, [99_999]], [0, 1, 2, 3, 4], "int32"],
    ]


def test_empty_documents_are_counted_and_left_out(tmp_path: Path):
    with IndexedWriter(tmp_path / "text", 100) as writer:
        for document in ([], [3, 4], [], [5]):
            writer.add(np.array(document, dtype=np.int32))
    assert (writer.num_documents, writer.num_tokens, writer.num_empty, writer.num_bytes) == (2, 3, 2, 6)
    assert read_indexed(str(tmp_path / "text")).num_documents == 2


def test_no_document_at_all_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"no document with a token was added \(1 were empty\)\. Give some text"):
        write(tmp_path / "text", [[]])
    assert names(tmp_path) == []


@pytest.mark.parametrize("token", [100, -1, 2**32 + 1])
def test_a_token_outside_the_vocabulary_names_document_and_token(tmp_path: Path, token: int):
    with pytest.raises(
        DataError, match=rf"document 2, token 1: {token} is not in \[0, vocab_size=100\)\. Give the voc"
    ):
        write(tmp_path / "text", [[1], [], [3, token, 5]])
    assert names(tmp_path) == []


def test_a_document_longer_than_the_format_holds_is_refused(tmp_path: Path):
    too_long = np.broadcast_to(np.uint16(1), 2**31)
    message = r"document 0 has 2147483648 tokens; .*Split"
    with pytest.raises(DataError, match=message), IndexedWriter(tmp_path / "text", 100) as writer:
        writer.add(too_long)
    assert names(tmp_path) == []


@pytest.mark.parametrize("vocab_size", [0, -1, 2**31 + 1])
def test_an_impossible_vocabulary_is_refused(tmp_path: Path, vocab_size: int):
    with pytest.raises(DataError, match=rf"vocab_size={vocab_size} must be from 1 to 2147483648"):
        IndexedWriter(tmp_path / "text", vocab_size)


def test_nothing_has_its_name_before_the_end(tmp_path: Path):
    with IndexedWriter(tmp_path / "text", 100) as writer:
        writer.add(np.array([1]))
        assert all(name.endswith(".partial") for name in names(tmp_path))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_exception_leaves_what_was_there(tmp_path: Path, error: type[BaseException], overwrite: bool):
    if overwrite:
        write(tmp_path / "text")
    before = contents(tmp_path)

    def interrupted() -> None:
        with IndexedWriter(tmp_path / "text", 100, overwrite=overwrite) as writer:
            writer.add(np.array([1]))
            raise error

    with pytest.raises(error):
        interrupted()
    assert contents(tmp_path) == before


def test_the_index_is_published_last_and_the_old_one_removed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rename, seen = Path.rename, []

    def watched(path: Path, target: Path) -> Path:
        seen.append((target.name, (tmp_path / "text.idx").exists(), (tmp_path / "text.json").exists()))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watched)
    for _ in range(2):
        seen.clear()
        write_described(tmp_path / "text")
        assert seen == [("text.bin", False, False), ("text.json", False, False), ("text.idx", False, True)]
    assert json.loads((tmp_path / "text.json").read_text()) == {"tokens": 1}
    write(tmp_path / "text", overwrite=True)
    assert names(tmp_path) == ["text.bin", "text.idx"]


@pytest.mark.parametrize("failing", [".bin", ".json", ".idx"])
def test_a_publication_that_fails_leaves_nothing(tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch):
    rename = Path.rename

    def failing_rename(path: Path, target: Path) -> Path:
        if target.suffix == failing:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(DataError, match=r"text: cannot be written \(Input/output error\)\. Free space, or give"):
        write_described(tmp_path / "text")
    assert names(tmp_path) == []


def test_both_files_are_on_disk_before_they_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sync, synced = os.fsync, []

    def watched(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((name, os.fstat(descriptor).st_size if name.endswith("partial") else None))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write(tmp_path / "text")
    assert synced[:2] == [("text.bin.partial", 18), ("text.idx.partial", 34 + 3 * 4 + 3 * 8 + 4 * 8)]
    assert synced[-1] == (tmp_path.name, None)


def test_a_full_disk_is_an_error_of_the_user_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"No space left on device"):
        write(tmp_path / "text")
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["text.bin", "text.idx", "text.json"])
def test_existing_files_are_not_overwritten_unless_asked(tmp_path: Path, name: str):
    (tmp_path / name).write_text("mine")
    with pytest.raises(DataError, match=rf"{name}: exists, and is not overwritten\. Give another name, or remove"):
        write(tmp_path / "text")
    assert contents(tmp_path) == {name: b"mine"}
    write(tmp_path / "text", overwrite=True)
    assert read_indexed(str(tmp_path / "text")).num_documents == 3


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("text.bin", r"text\.bin: the ending is added\. Give the prefix .*/text\."),
        ("text.idx", r"the ending is added"),
        ("", r"a folder, not a prefix\. Give the name of the files too, such as .*/text\."),
        ("none/text", r"no folder .*/none\. Make it, or give another name\."),
        ("file", r"a file, which data\.path would mean .*Give another name\."),
        ("taken", r"taken\.idx: a folder\. Give another name\."),
    ],
)
def test_a_prefix_that_cannot_be_one_is_refused(tmp_path: Path, prefix: str, message: str):
    (tmp_path / "file").touch()
    (tmp_path / "taken.idx").mkdir()
    with pytest.raises(DataError, match=message):
        write(tmp_path / prefix, overwrite=True)
    assert names(tmp_path) == ["file", "taken.idx"]


def test_a_second_writer_of_the_same_files_is_refused_and_the_first_goes_on(tmp_path: Path):
    with IndexedWriter(tmp_path / "text", 100) as writer:
        writer.add(np.array([1]))
        with pytest.raises(DataError, match=r"text\.bin: another process is writing it\. Wait for it, or give another"):
            write(tmp_path / "text", overwrite=True)
        writer.add(np.array([2]))
    assert read_indexed(str(tmp_path / "text")).tokens.tolist() == [1, 2]


def test_what_a_killed_process_left_is_replaced(tmp_path: Path):
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"text{suffix}.partial").write_bytes(b"x" * 1000)
    write(tmp_path / "text")
    write(tmp_path / "other")
    assert (tmp_path / "text.idx").read_bytes() == (tmp_path / "other.idx").read_bytes()
    assert names(tmp_path) == ["other.bin", "other.idx", "text.bin", "text.idx"]
