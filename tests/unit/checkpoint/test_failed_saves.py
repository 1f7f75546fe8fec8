"""A save that fails at any stage: older steps are as they were, nothing is left behind, the next save succeeds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_framework.checkpoint import folder, save
from moe_framework.checkpoint.manifest import read_manifest
from moe_framework.checkpoint.ranks import Ranks
from moe_framework.checkpoint.save import SaveFailedError
from moe_framework.checkpoint.store import CheckpointStore
from moe_framework.errors import RankError
from tests.helpers.mounts import set_writable, small_disk, used_bytes
from tests.helpers.tiny_runs import content
from tests.unit.checkpoint.steps import empty_like, example_tensors, make_store, save_step

STAGES = ["mkdir", "write", "metadata", "hash", "sync", "manifest"]


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def fail_at(stage: str, patch: pytest.MonkeyPatch) -> None:
    """Let a save fail at a stage, as on a disk that is full from there on."""
    if stage == "aside":
        patch.setattr(Path, "rename", full)
    elif stage == "mkdir":
        patch.setattr(Path, "mkdir", full)
    elif stage == "write":
        real_write = save._Writer.write_data

        def write_half(writer, plan, planner):
            real_write(writer, plan, planner)
            full()

        patch.setattr(save._Writer, "write_data", write_half)
    elif stage == "metadata":
        patch.setattr(save._Writer, "finish", lambda writer, **_: (writer.path / ".metadata.tmp").touch() or full())
    elif stage in ("hash", "sync"):
        patch.setattr(save, {"hash": "hash_file", "sync": "sync_folder"}[stage], full)
    else:
        name = {"manifest": "manifest.json.tmp", "latest": "latest.tmp"}[stage]
        real_replace = Path.replace
        patch.setattr(Path, "replace", lambda path, to: full() if path.name == name else real_replace(path, to))


def save_and_wait(store: CheckpointStore, step: int) -> None:
    store.save(step, example_tensors(seed=step), {})
    store.wait()


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_failed_save_leaves_the_folder_as_it_was_and_can_be_repeated(tmp_path, monkeypatch, stage, async_save):
    store = make_store(tmp_path, keep=1, async_save=async_save)
    save_and_wait(store, 1)
    before = content(tmp_path)
    with monkeypatch.context() as patch:
        fail_at(stage, patch)
        with pytest.raises(SaveFailedError, match=r"step_00000002: not saved: .*No space left.* Steps .* untouched\."):
            save_and_wait(store, 2)
    assert content(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step_00000001"}
    save_and_wait(store, 2)
    store.close()
    assert store.latest_step() == tmp_path / "step_00000002"
    store.load(tmp_path / "step_00000002", empty_like(example_tensors()))


@pytest.mark.parametrize("stage", ["aside", *STAGES])
def test_complete_step_that_was_to_be_replaced_is_back_after_a_failure(tmp_path, monkeypatch, stage):
    save_step(tmp_path, step=1)
    before = content(tmp_path)
    with monkeypatch.context() as patch:
        fail_at(stage, patch)
        with pytest.raises(SaveFailedError):
            save_step(tmp_path, step=1, seed=5)
    assert content(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step_00000001"}


@pytest.mark.parametrize("step", [1, 2])
def test_step_whose_latest_cannot_be_written_stays_is_found_and_counts_as_failed(tmp_path, monkeypatch, step):
    save_step(tmp_path, step=1)
    older = content(tmp_path / "step_00000001")
    with monkeypatch.context() as patch:
        fail_at("latest", patch)
        with pytest.raises(SaveFailedError, match=f"step_0000000{step}: complete, but not published: .*No space left"):
            make_store(tmp_path, keep=1).save(step, example_tensors(seed=2), {})
    # Nothing is deleted for a step that was not published, and nothing half-written is left.
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step_00000001", f"step_0000000{step}"}
    assert (tmp_path / "latest").read_text() == "step_00000001\n"
    assert step == 1 or content(tmp_path / "step_00000001") == older
    store, tensors = make_store(tmp_path, keep=1), empty_like(example_tensors())
    assert store.latest_step() == tmp_path / f"step_0000000{step}"
    store.load(tmp_path / f"step_0000000{step}", tensors)
    assert all(torch.equal(tensors[name], value) for name, value in example_tensors(seed=2).items())
    store.save(step, example_tensors(seed=3), {})
    assert (tmp_path / "latest").read_text() == f"step_0000000{step}\n"


def test_failed_retention_is_no_failed_save(tmp_path, monkeypatch, caplog):
    store = make_store(tmp_path, keep=1)
    store.save(1, example_tensors(), {})
    with monkeypatch.context() as patch:
        patch.setattr(folder.shutil, "rmtree", full)
        store.save(2, example_tensors(), {})
    assert "old steps could not be deleted" in caplog.text
    assert store.latest_step() == tmp_path / "step_00000002"


def test_failure_whose_remains_cannot_be_removed_is_still_that_failure(tmp_path, monkeypatch, caplog):
    older = save_step(tmp_path, step=1)
    store = make_store(tmp_path)
    with monkeypatch.context() as patch:
        fail_at("manifest", patch)
        patch.setattr(folder.shutil, "rmtree", full)
        with pytest.raises(SaveFailedError, match=r"step_00000002: not saved: .*No space left"):
            store.save(2, example_tensors(), {})
    assert "what a failed save left could not be removed" in caplog.text
    assert (tmp_path / "step_00000002").exists()
    assert store.latest_step() == older
    store.save(2, example_tensors(), {})
    assert sorted(read_manifest(tmp_path / "step_00000002").files) == [".metadata", "__0_0.distcp"]
    assert len(list((tmp_path / "step_00000002").iterdir())) == 3


def gone(*_: object) -> None:
    raise RuntimeError("Connection closed by peer")


def test_save_that_lost_a_rank_is_another_error_and_touches_nothing(tmp_path, monkeypatch):
    save_step(tmp_path, step=1)
    before = content(tmp_path)
    monkeypatch.setattr(Ranks, "gather", gone)
    with pytest.raises(RankError, match=r"step_00000002: the save was cut short: .*Connection closed by peer"):
        save_step(tmp_path, step=2)
    # Another rank may be writing still.
    assert (tmp_path / "step_00000002" / "__0_0.distcp").exists()
    assert {name: data for name, data in content(tmp_path).items() if "00000002" not in name} == before


@pytest.mark.parametrize("reason", ["lost rank", "full disk"])
def test_end_of_a_failed_run_keeps_its_error_and_logs_that_of_the_save(tmp_path, monkeypatch, caplog, reason):
    monkeypatch.setattr(*(Ranks, "gather", gone) if reason == "lost rank" else (save, "hash_file", full))
    store = make_store(tmp_path, async_save=True)
    store.save(1, example_tensors(), {})
    with pytest.raises(ValueError, match="the first error"), store:
        raise ValueError("the first error")
    assert "step_00000001: " in caplog.text


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", num_bytes=64 * 1024) as mounted:
        yield mounted


def test_disk_that_is_really_full_is_said_to_be_and_is_as_empty_as_before(disk: Path):
    store = make_store(disk / "steps")
    store.save(1, example_tensors(), {})
    before, used = content(disk), used_bytes(disk)
    with pytest.raises(SaveFailedError, match=r"step_00000002: not saved: .*No space left on device"):
        store.save(2, {"model.large": torch.zeros(64 * 1024)}, {})
    assert content(disk) == before
    assert used_bytes(disk) == used
    store.save(2, example_tensors(seed=2), {})
    assert store.latest_step() == disk / "steps" / "step_00000002"


def test_folder_that_really_became_read_only_is_said_to_be(disk: Path):
    store = make_store(disk / "steps", keep=1)
    store.save(1, example_tensors(), {})
    before = content(disk)
    set_writable(disk, writable=False)
    with pytest.raises(SaveFailedError, match=r"step_00000002: not saved: .*Read-only file system"):
        store.save(2, example_tensors(), {})
    assert content(disk) == before
    assert store.latest_step() == disk / "steps" / "step_00000001"
    set_writable(disk, writable=True)
    store.save(2, example_tensors(), {})
    assert store.latest_step() == disk / "steps" / "step_00000002"
