import threading
from pathlib import Path

import pytest
import torch

from moe_framework.checkpoint import folder, save
from moe_framework.checkpoint.manifest import read_manifest
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.steps import empty_like, example_tensors, make_store, save_step


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("async_save", [False, True])
def test_saved_step_loads_bit_for_bit_with_its_state(tmp_path, async_save):
    store = make_store(tmp_path / "new" / "folder", async_save=async_save)
    store.save(200, example_tensors(), {"samples": 12800, "lr": 0.1}, {"rng": "abc"})
    store.close()
    step_dir = tmp_path / "new" / "folder" / "step_00000200"
    assert store.latest_step() == step_dir
    tensors = empty_like(example_tensors())
    manifest = store.load(step_dir, tensors)
    assert_equal(tensors, example_tensors())
    assert (manifest.step, manifest.state) == (200, {"samples": 12800, "lr": 0.1})
    assert manifest.rank_states == [{"rng": "abc"}]
    assert manifest.versions["torch"] == torch.__version__
    assert sorted(manifest.files) == [".metadata", "__0_0.distcp"]


def test_background_save_equals_foreground_save_although_everything_changes_at_once(tmp_path):
    transposed = torch.randn(6, 4).t()
    tensors, state = {**example_tensors(), "model.transposed": transposed}, {"samples": [1]}
    make_store(tmp_path / "sync").save(1, tensors, state)
    store = make_store(tmp_path / "async", async_save=True)
    store.save(1, tensors, state)
    for tensor in tensors.values():
        tensor.fill_(7)
    state["samples"].append(2)
    store.close()
    steps = [read_manifest(tmp_path / kind / "step_00000001") for kind in ("sync", "async")]
    assert steps[0].files["__0_0.distcp"] == steps[1].files["__0_0.distcp"]
    assert steps[0].state == steps[1].state == {"samples": [1]}


def test_second_background_save_waits_for_the_first(tmp_path):
    store = make_store(tmp_path, async_save=True)
    for step in (1, 2, 3):
        store.save(step, example_tensors(seed=step), {})
    store.close()
    for step in (1, 2, 3):
        tensors = empty_like(example_tensors())
        store.load(tmp_path / f"step_{step:08d}", tensors)
        assert_equal(tensors, example_tensors(seed=step))
    assert (tmp_path / "latest").read_text() == "step_00000003\n"


def test_save_returns_before_the_write_and_poll_reports_its_end(tmp_path, monkeypatch):
    release = threading.Event()
    write = save._write_tensors
    monkeypatch.setattr(save, "_write_tensors", lambda *args: release.wait(30) and write(*args))
    store = make_store(tmp_path, async_save=True)
    store.save(1, example_tensors(), {})
    assert 0 < store.save_stall_s < 30
    assert store.poll() is False
    assert store.poll() is False
    release.set()
    store.wait()
    assert store.poll() is True
    assert store.latest_step() == tmp_path / "step_00000001"


@pytest.mark.parametrize("surface", ["save", "wait", "poll", "close"])
def test_background_failure_surfaces_once_and_leaves_older_steps(tmp_path, monkeypatch, surface):
    store = make_store(tmp_path, keep=1, async_save=True)
    store.save(1, example_tensors(), {})
    store.wait()

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(save, "_write_tensors", fail)
        store.save(2, example_tensors(), {})
        while store._in_flight is not None and not store._in_flight.done():
            pass
    actions = {
        "save": lambda: store.save(3, example_tensors(), {}),
        "wait": store.wait,
        "poll": store.poll,
        "close": store.close,
    }
    with pytest.raises(CheckpointError, match=r"step_00000002: not saved: OSError: .*No space left.*untouched"):
        actions[surface]()
    store.wait()
    assert store.latest_step() == tmp_path / "step_00000001"
    store.load(tmp_path / "step_00000001", empty_like(example_tensors()))


def test_failure_inside_dcp_is_a_checkpoint_error(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(save._Writer, "write_data", fail)
    with pytest.raises(CheckpointError, match=r"not saved: rank 0: OSError: .*Input/output error"):
        make_store(tmp_path).save(1, example_tensors(), {})


def test_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"not saved: .*(NotADirectory|FileExists)"):
        make_store(tmp_path / "file").save(1, example_tensors(), {})
    with pytest.raises(CheckpointError, match=r"not saved: .*Error"):
        make_store(Path("/proc/nowhere")).save(1, example_tensors(), {})


def test_meta_tensor_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="w is on the meta device"):
        make_store(tmp_path).save(1, {"w": torch.empty(2, device="meta")}, {})


def test_left_overs_of_a_killed_save_do_not_enter_the_step(tmp_path):
    stale = tmp_path / "step_00000200"
    stale.mkdir()
    for name in ("__7_0.distcp", ".metadata", "manifest.json.tmp"):
        (stale / name).write_bytes(b"stale")
    step_dir = save_step(tmp_path)
    assert sorted(path.name for path in step_dir.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json"]
    make_store(tmp_path).load(step_dir, empty_like(example_tensors()))


@pytest.mark.parametrize("crash_at", ["_write_tensors", "_publish_manifest"])
def test_crash_before_the_manifest_leaves_the_step_before(tmp_path, monkeypatch, crash_at):
    older = save_step(tmp_path, step=1)

    def crash(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(save, crash_at, crash)
        with pytest.raises(KeyboardInterrupt):
            save_step(tmp_path, step=2)
    assert make_store(tmp_path).latest_step() == older
    assert save_step(tmp_path, step=2) == make_store(tmp_path).latest_step()


def test_crash_between_manifest_and_latest_resumes_from_the_new_step(tmp_path, monkeypatch):
    save_step(tmp_path, step=1)

    def crash(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder, "publish_latest", crash)
        with pytest.raises(KeyboardInterrupt):
            save_step(tmp_path, step=2, seed=2)
    assert (tmp_path / "latest").read_text() == "step_00000001\n"
    store, tensors = make_store(tmp_path), empty_like(example_tensors())
    step_dir = tmp_path / "step_00000002"
    assert store.latest_step() == step_dir
    store.load(step_dir, tensors)
    assert_equal(tensors, example_tensors(seed=2))


def test_crash_while_a_complete_step_is_saved_again_keeps_it(tmp_path, monkeypatch):
    step_dir = save_step(tmp_path, step=1)

    def crash(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(save, "_write_tensors", crash)
        with pytest.raises(KeyboardInterrupt):
            save_step(tmp_path, step=1, seed=5)
    store, tensors = make_store(tmp_path), empty_like(example_tensors())
    assert store.latest_step() == step_dir
    store.load(step_dir, tensors)
    assert_equal(tensors, example_tensors())


def test_old_steps_are_deleted_and_the_newest_kept(tmp_path):
    store = make_store(tmp_path, keep=2)
    for step in (10, 20, 30, 40):
        store.save(step, example_tensors(), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000030", "step_00000040"]


def test_step_that_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="not a complete step"):
        make_store(tmp_path).load(tmp_path / "step_00000001", {})
    assert make_store(tmp_path).latest_step() is None
