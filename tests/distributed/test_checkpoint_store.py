"""The checkpoint store over several gloo ranks."""

import os
import pickle
from pathlib import Path

import pytest

from moe_framework.checkpoint import read_manifest
from tests.distributed import checkpoint_jobs as jobs
from tests.unit.checkpoint.steps import rewrite_checksums


def the_error(outcomes: list[tuple[str, str] | None], kind: str = "CheckpointError") -> str:
    """The text of the one error that every rank raised."""
    assert len(set(outcomes)) == 1, outcomes
    assert outcomes[0] is not None
    assert outcomes[0][0] == kind, outcomes
    return outcomes[0][1]


def the_failed_save(outcomes: list[tuple[str, str] | None]) -> str:
    """The text of the one failed save that every rank heard of, and may go on after."""
    return the_error(outcomes, "SaveFailedError")


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved_2_2")
    ranks.run(jobs.save_at, 4, directory, 2, 2, True)
    return directory


@pytest.mark.parametrize(("dp", "ep"), [(1, 1), (2, 2), (1, 4), (4, 1), (1, 2), (2, 1)])
def test_step_saved_at_2_2_loads_bit_for_bit_at(ranks, saved, dp, ep):
    manifests = ranks.run(jobs.load_at, dp * ep, saved, dp, ep)
    assert manifests[0].state == {"layout": {"dp": 2, "ep": 2}}
    assert manifests[0].rank_states == [{"rank": rank} for rank in range(4)]
    assert all(manifest == manifests[0] for manifest in manifests)


@pytest.mark.parametrize(("dp", "ep"), [(1, 1), (4, 1), (1, 4)])
def test_step_saved_at_other_layouts_loads_at_2_2(ranks, tmp_path, dp, ep):
    ranks.run(jobs.save_at, dp * ep, tmp_path, dp, ep, False)
    ranks.run(jobs.load_at, 4, tmp_path, 2, 2)


def test_background_save_equals_foreground_save_bit_for_bit(ranks, saved, tmp_path):
    ranks.run(jobs.save_at, 4, tmp_path, 2, 2, False)
    foreground, background = (read_manifest(path / "step_00000200") for path in (tmp_path, saved))
    tensor_files = [name for name in foreground.files if name.endswith(".distcp")]
    assert len(tensor_files) == 4
    assert all(foreground.files[name] == background.files[name] for name in tensor_files)
    assert foreground.tensors == background.tensors


def test_names_and_shapes_are_those_of_the_unsharded_model(saved):
    tensors = read_manifest(saved / "step_00000200").tensors
    assert {name: entry.shape for name, entry in tensors.items()} == jobs.SHAPES


def test_replicas_of_shards_are_saved_once(ranks, tmp_path):
    ranks.run(jobs.save_replicated_mesh, 4, tmp_path)
    step_dir = tmp_path / "step_00000001"
    values = 12 * 4
    assert sum(path.stat().st_size for path in step_dir.glob("*.distcp")) < values + 2 * 1600


def test_fsdp_model_and_optimizer_resume_bit_for_bit(ranks, tmp_path):
    ranks.run(jobs.resume_fsdp_model, 2, tmp_path)


def test_default_group_serves_foreground_saves(ranks, tmp_path):
    ranks.run(jobs.save_without_group_argument, 2, tmp_path)
    ranks.run(jobs.load_at, 2, tmp_path, 1, 2)


def copy_of(saved: Path, tmp_path: Path) -> Path:
    step_dir = tmp_path / "step_00000200"
    step_dir.mkdir()
    for path in (saved / step_dir.name).iterdir():
        (step_dir / path.name).write_bytes(path.read_bytes())
    return step_dir


@pytest.mark.parametrize("file", ["__0_0.distcp", "__3_0.distcp", ".metadata"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_damaged_file_is_named_on_every_rank(ranks, saved, tmp_path, file, damage):
    path = copy_of(saved, tmp_path) / file
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[:-1])
    elif damage == "flip":
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
    else:
        path.unlink()
    error = the_error(ranks.run_expecting_error(jobs.load_untouched_on_error, 2, tmp_path, 1, 2))
    assert file in error
    assert "resume from another step" in error


def test_wrong_model_is_refused_on_every_rank(ranks, saved):
    error = the_error(ranks.run_expecting_error(jobs.load_wrong_experts, 2, saved, 1, 2))
    assert error == (
        "step_00000200: 'model.layers.3.moe.experts.gate_up' is [4, 8, 6] on disk, [8, 8, 6] in the model. "
        "Load with the saved config.yaml."
    )


class Touch:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_crafted_metadata_runs_on_no_rank(ranks, saved, tmp_path):
    step_dir, marker = copy_of(saved, tmp_path), tmp_path / "ran"
    (step_dir / ".metadata").write_bytes(pickle.dumps(Touch(marker)))
    rewrite_checksums(step_dir)
    error = the_error(ranks.run_expecting_error(jobs.load_untouched_on_error, 2, tmp_path, 2, 1))
    assert "refused: it wants posix.system" in error
    assert not marker.exists()


def test_crafted_tensor_file_runs_on_no_rank(ranks, saved, tmp_path):
    step_dir, marker = copy_of(saved, tmp_path), tmp_path / "ran"
    for path in step_dir.glob("*.distcp"):
        payload = pickle.dumps(Touch(marker))
        path.write_bytes(payload + bytes(path.stat().st_size - len(payload)))
    rewrite_checksums(step_dir)
    error = the_error(ranks.run_expecting_error(jobs.load_untouched_on_error, 2, tmp_path, 2, 1))
    assert "is refused" in error
    assert not marker.exists()


def test_shards_passed_as_plain_tensors_are_refused(ranks, tmp_path):
    error = the_failed_save(ranks.run_expecting_error(jobs.save_shards_as_plain_tensors, 2, tmp_path))
    assert "'experts' is [2, 3] float32 a replica" in error
    assert "as a DTensor" in error
    assert ranks.run(jobs.latest, 1, tmp_path) == [None]


def test_ranks_with_different_names_are_refused(ranks, tmp_path):
    error = the_failed_save(ranks.run_expecting_error(jobs.save_different_names, 2, tmp_path))
    assert "'w0' is [2] float32" in error
    assert "missing on rank 1" in error


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("async_save", [False, True])
def test_rank_that_cannot_stage_fails_all(ranks, tmp_path, rank, async_save):
    error = the_failed_save(
        ranks.run_expecting_error(jobs.save_unserialisable_on_one_rank, 2, tmp_path, rank, async_save)
    )
    assert "TypeError" in error


@pytest.mark.parametrize("surface", ["wait", "save", "poll"])
def test_background_failure_is_the_same_error_on_every_rank(ranks, tmp_path, surface):
    results = ranks.run(jobs.background_failure, 2, tmp_path, 1, surface)
    (first, first_polls, newest), (second, second_polls, _) = results
    assert first == second
    assert "step_00000300: not saved: rank 1: OSError: [Errno 28] No space left on device" in first
    assert first_polls == second_polls
    assert newest == tmp_path / "step_00000200"
    ranks.run(jobs.load_at, 2, tmp_path, 2, 1)


def test_unwritable_folder_is_the_same_error_on_every_rank(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    error = the_failed_save(ranks.run_expecting_error(jobs.save_at, 2, tmp_path / "file", 2, 1, True))
    assert "not saved" in error
    assert str(tmp_path / "file") in error


def test_training_goes_on_while_a_save_is_held(ranks, tmp_path):
    assert ranks.run(jobs.train_while_saving, 2, tmp_path) == [True, True]
    ranks.run(jobs.load_at, 1, tmp_path, 1, 1)


def test_poll_reports_the_end_on_no_rank_before_all(ranks, tmp_path):
    assert ranks.run(jobs.poll_while_one_rank_is_late, 2, tmp_path) == [([False] * 5, True)] * 2


def test_death_between_manifest_and_latest_resumes_from_the_new_step(ranks, tmp_path):
    the_failed_save(ranks.run_expecting_error(jobs.die_before_latest, 2, tmp_path))
    assert not (tmp_path / "latest").exists()
    assert ranks.run(jobs.latest, 2, tmp_path) == [tmp_path / "step_00000200"] * 2
    ranks.run(jobs.load_at, 1, tmp_path, 1, 1)


def test_left_overs_of_more_ranks_do_not_enter_a_step(ranks, tmp_path):
    stale = tmp_path / "step_00000200"
    stale.mkdir()
    (stale / "__3_0.distcp").write_bytes(b"stale")
    (first, _) = ranks.run(jobs.save_at, 2, tmp_path, 2, 1, True)
    assert first == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    ranks.run(jobs.load_at, 1, tmp_path, 1, 1)


def test_damaged_newest_manifest_is_an_error_on_every_rank(ranks, saved, tmp_path):
    (copy_of(saved, tmp_path) / "manifest.json").write_text("{}")
    assert "manifest.json" in the_error(ranks.run_expecting_error(jobs.latest, 2, tmp_path))
