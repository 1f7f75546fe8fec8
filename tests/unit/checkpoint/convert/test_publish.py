import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from moe_framework.checkpoint.convert import publish
from moe_framework.checkpoint.convert.publish import check_space, publishing
from moe_framework.errors import CheckpointError

Usage = namedtuple("Usage", "total used free")


def test_the_folder_appears_when_the_block_ends(tmp_path: Path):
    with publishing(tmp_path / "new" / "target") as folder:
        (folder / "file").write_text("x")
        assert folder.parent == tmp_path / "new"
        assert not (tmp_path / "new" / "target").exists()
    assert (tmp_path / "new" / "target" / "file").read_text() == "x"
    assert os.listdir(tmp_path / "new") == ["target"]


def test_nothing_is_left_after_an_error(tmp_path: Path):
    def fail() -> None:
        with publishing(tmp_path / "target") as folder:
            (folder / "file").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path):
    (tmp_path / "target.partial" / "deep").mkdir(parents=True)
    (tmp_path / "target.partial" / "old").write_text("old")
    with publishing(tmp_path / "target") as folder:
        assert os.listdir(folder) == []
    assert os.listdir(tmp_path / "target") == []


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_a_target_that_exists_is_refused_and_kept(tmp_path: Path, kind: str):
    target = tmp_path / "target"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"target: exists\. Give another name"), publishing(target):
        pass
    assert target.is_symlink() or target.exists()
    assert os.listdir(tmp_path) == ["target"]


def test_a_second_writer_is_refused_and_the_first_goes_on(tmp_path: Path):
    with publishing(tmp_path / "target") as folder:
        (folder / "file").write_text("first")
        with pytest.raises(CheckpointError, match="another conversion is writing it"), publishing(tmp_path / "target"):
            pass
    assert (tmp_path / "target" / "file").read_text() == "first"


def test_a_disk_that_is_too_full_is_refused_with_both_numbers(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 5 * 2**20))
    check_space(tmp_path / "a" / "b" / "target", 4 * 2**20)
    with pytest.raises(CheckpointError, match=r"target: needs 5,242,881 bytes, and .* has 5,242,880 free"):
        check_space(tmp_path / "a" / "b" / "target", 4 * 2**20 + 1)


def test_what_a_killed_process_left_counts_as_free(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 2**20))
    (tmp_path / "target.partial").mkdir()
    (tmp_path / "target.partial" / "old").write_bytes(os.urandom(2**20))
    check_space(tmp_path / "target", 2**20)


def test_the_folder_of_a_writer_that_failed_cannot_be_taken_over(tmp_path: Path, monkeypatch):
    # Between opening the folder and locking it, its writer fails and removes it, and a third process makes a new one.
    partial = tmp_path / "target.partial"

    def replaced(descriptor: int, operation: int) -> None:
        partial.rmdir()
        partial.mkdir()
        (partial / "theirs").touch()

    monkeypatch.setattr(publish.fcntl, "flock", replaced)
    with pytest.raises(CheckpointError, match="another conversion is writing it"), publishing(tmp_path / "target"):
        pass
    assert (partial / "theirs").exists()


def test_a_target_that_appears_while_waiting_is_kept(tmp_path: Path, monkeypatch):
    target = tmp_path / "target"
    monkeypatch.setattr(publish.fcntl, "flock", lambda *_: target.mkdir())
    with pytest.raises(CheckpointError, match="exists"), publishing(target):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
