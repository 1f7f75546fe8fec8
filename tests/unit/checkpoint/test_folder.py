import os
from pathlib import Path

import pytest

from moe_framework.checkpoint import folder
from moe_framework.checkpoint.manifest import Manifest, write_manifest
from moe_framework.errors import CheckpointError


def publish(directory: Path, step: int, publication: int, *, latest: bool = True) -> Path:
    step_dir = directory / folder.step_name(step)
    folder.make_empty(step_dir)
    (step_dir / "__0_0.distcp").write_bytes(b"data")
    write_manifest(step_dir, Manifest(step, publication, {}, {}, {}, {}, []))
    if latest:
        folder.publish_latest(step_dir)
    return step_dir


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_empty_or_missing_folder_has_no_newest_step(tmp_path):
    assert folder.newest_step(tmp_path) is None
    assert folder.newest_step(tmp_path / "missing") is None
    assert folder.next_publication(tmp_path / "missing") == 1


def test_latest_is_one_line_with_the_folders_name(tmp_path):
    step_dir = publish(tmp_path, 200, 1)
    assert (tmp_path / "latest").read_text() == "step_00000200\n"
    assert folder.newest_step(tmp_path) == step_dir


def test_step_published_before_a_crash_that_lost_latest_is_found(tmp_path):
    publish(tmp_path, 100, 1)
    newer = publish(tmp_path, 200, 2, latest=False)
    assert folder.newest_step(tmp_path) == newer


@pytest.mark.parametrize("content", ["", "step_00000999\n", "../step_00000100", "\xff"])
def test_useless_latest_is_survived(tmp_path, content):
    publish(tmp_path, 100, 1)
    newer = publish(tmp_path, 200, 2)
    (tmp_path / "latest").write_text(content, encoding="latin-1")
    assert folder.newest_step(tmp_path) == newer


def test_step_without_manifest_does_not_exist(tmp_path):
    older = publish(tmp_path, 100, 1)
    (publish(tmp_path, 200, 2) / "manifest.json").unlink()
    assert folder.newest_step(tmp_path) == older
    assert folder.complete_steps(tmp_path) == [older]


def test_run_that_went_back_continues_from_its_own_last_step(tmp_path):
    publish(tmp_path, 100, 1)
    publish(tmp_path, 300, 2)
    again = publish(tmp_path, 200, folder.next_publication(tmp_path), latest=False)
    assert folder.newest_step(tmp_path) == again


def test_damaged_newest_manifest_is_an_error_and_not_a_silent_step_back(tmp_path):
    publish(tmp_path, 100, 1)
    (publish(tmp_path, 200, 2) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step_00000200/manifest\.json: not valid JSON"):
        folder.newest_step(tmp_path)


def test_damaged_older_manifest_does_not_stop_a_resume(tmp_path):
    (publish(tmp_path, 100, 1) / "manifest.json").write_text("{")
    newest = publish(tmp_path, 200, 2)
    assert folder.newest_step(tmp_path) == newest


@pytest.mark.parametrize(("keep", "kept"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_keep_counts_the_newest_steps(tmp_path, keep, kept):
    steps = [publish(tmp_path, number, number) for number in (1, 2, 3, 4)]
    folder.delete_old_steps(steps[-1], keep)
    assert names(tmp_path) == ["latest", *(folder.step_name(number) for number in kept)]


def test_a_manifest_is_read_once_and_again_when_it_was_replaced(tmp_path, monkeypatch):
    read, manifests = [], folder.read_manifest
    monkeypatch.setattr(folder, "read_manifest", lambda step_dir: read.append(step_dir.name) or manifests(step_dir))
    for step in (1, 2, 3):
        folder.delete_old_steps(publish(tmp_path, step, folder.next_publication(tmp_path)), keep=0)
    assert read == ["step_00000001", "step_00000002", "step_00000003"]
    publish(tmp_path, 2, folder.next_publication(tmp_path))
    assert folder.next_publication(tmp_path) == 5
    assert read[3:] == ["step_00000002"]


def test_step_that_latest_names_is_never_deleted(tmp_path):
    named = publish(tmp_path, 1, 1)
    publish(tmp_path, 2, 2, latest=False)
    newest = publish(tmp_path, 3, 3, latest=False)
    folder.delete_old_steps(newest, keep=1)
    assert folder.complete_steps(tmp_path) == [named, newest]


@pytest.mark.parametrize("content", [None, "", "step_00000001\n", "step_00000099\n", "../x", "\0"])
@pytest.mark.parametrize("keep", [1, 2])
def test_retention_keeps_the_newest_step_whatever_latest_and_the_clock_say(tmp_path, content, keep):
    # A run that went back: the newest step has neither the highest number nor the latest time.
    steps = [publish(tmp_path, number, publication) for publication, number in enumerate((1, 9, 2, 3), start=1)]
    newest = steps[-1]
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_text(content)
    for age, step_dir in enumerate(steps):
        os.utime(step_dir, (1e9 - age, 1e9 - age))
    folder.delete_old_steps(newest, keep)
    expected = {newest} | ({steps[2]} if keep == 2 else set()) | ({steps[0]} if content == "step_00000001\n" else set())
    assert set(folder.complete_steps(tmp_path)) == expected
    assert folder.newest_step(tmp_path) == newest


def test_retention_called_for_an_older_step_keeps_the_newest(tmp_path):
    steps = [publish(tmp_path, number, number) for number in (1, 2, 3)]
    (tmp_path / "latest").unlink()
    folder.delete_old_steps(steps[0], keep=1)
    assert folder.complete_steps(tmp_path) == [steps[0], steps[2]]


def test_retention_leaves_steps_whose_manifest_it_cannot_read(tmp_path):
    damaged = publish(tmp_path, 1, 1)
    (damaged / "manifest.json").write_text("{")
    publish(tmp_path, 2, 2)
    folder.delete_old_steps(publish(tmp_path, 3, 3), keep=1)
    assert names(tmp_path) == ["latest", "step_00000001", "step_00000003"]


def test_deletion_that_a_crash_interrupted_leaves_no_step_and_is_finished_later(tmp_path, monkeypatch):
    old, new = publish(tmp_path, 1, 1), publish(tmp_path, 2, 2)

    def crash(path, *args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder.shutil, "rmtree", crash)
        with pytest.raises(KeyboardInterrupt):
            folder.delete_old_steps(new, keep=1)
    assert old.exists()
    assert folder.complete_steps(tmp_path) == [new]
    folder.delete_old_steps(new, keep=0)
    assert not old.exists()


def test_failed_deletion_is_logged_and_not_raised(tmp_path, monkeypatch, caplog):
    publish(tmp_path, 1, 1)
    new = publish(tmp_path, 2, 2)

    def fail(path, *args, **kwargs):
        raise PermissionError("no")

    monkeypatch.setattr(folder.shutil, "rmtree", fail)
    folder.delete_old_steps(new, keep=1)
    assert "could not be deleted" in caplog.text


def test_left_overs_of_a_killed_save_are_removed(tmp_path):
    step_dir = tmp_path / "step_00000005"
    step_dir.mkdir()
    (step_dir / "__3_0.distcp").write_bytes(b"old")
    folder.make_empty(step_dir)
    assert list(step_dir.iterdir()) == []


def test_complete_step_survives_a_crash_while_it_is_written_again(tmp_path):
    publish(tmp_path, 5, 1)
    step_dir = tmp_path / folder.step_name(5)
    folder.make_empty(step_dir)
    (step_dir / "__0_0.distcp").write_bytes(b"half")
    folder.restore_replaced(tmp_path)
    assert folder.newest_step(tmp_path) == step_dir
    assert (step_dir / "__0_0.distcp").read_bytes() == b"data"
    assert names(tmp_path) == ["latest", "step_00000005"]


def test_replaced_step_is_removed_once_its_successor_is_published(tmp_path):
    publish(tmp_path, 5, 1)
    step_dir = publish(tmp_path, 5, 2)
    assert "step_00000005.replaced" in names(tmp_path)
    folder.delete_old_steps(step_dir, keep=0)
    assert names(tmp_path) == ["latest", "step_00000005"]


def test_replaced_step_is_removed_after_a_crash_between_publishing_and_removing(tmp_path):
    publish(tmp_path, 5, 1)
    step_dir = publish(tmp_path, 5, 2)
    folder.restore_replaced(tmp_path)
    assert names(tmp_path) == ["latest", "step_00000005"]
    assert folder.next_publication(tmp_path) == 3
    assert step_dir.exists()
