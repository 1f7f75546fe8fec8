import json

import pytest

from moe_framework.checkpoint.manifest import FileEntry, Manifest, TensorEntry, read_manifest, write_manifest
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.steps import edit_manifest

MANIFEST = Manifest(
    step=200,
    publication=3,
    tensors={"model.head": TensorEntry((5, 3), "float32"), "model.scale": TensorEntry((), "bfloat16")},
    files={"__0_0.distcp": FileEntry(12, "0a" * 32)},
    versions={"torch": "2.11.0"},
    state={"lr": 0.1, "config": {"run": {"name": "α"}}, "nothing": None},
    rank_states=[{"rng": "x"}, {}],
)


def test_what_is_written_is_read(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_missing_manifest_means_no_complete_step(tmp_path):
    with pytest.raises(CheckpointError, match=r"no manifest\.json, so this is not a complete step"):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match="not a complete step"):
        read_manifest(tmp_path / "nowhere")


def test_any_flipped_bit_is_noticed(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    good = path.read_bytes()
    for position in range(len(good)):
        for bit in {position % 8, 5}:
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            path.write_bytes(bad)
            try:
                # Only the case of a \u escape's digits means nothing.
                assert read_manifest(tmp_path) == MANIFEST
                assert bad.lower() == good.lower()
            except CheckpointError as error:
                assert "manifest.json: " in str(error)  # noqa: PT017  # either outcome is right


def test_any_truncation_is_noticed(tmp_path):
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/passwd", "..", ".", "", "a\\b", "a\x00b", "manifest.json"])
def test_file_names_that_leave_the_folder_are_refused(tmp_path, name):
    write_manifest(tmp_path, MANIFEST)
    edit_manifest(tmp_path, files={name: {"size": 1, "sha256": "0a" * 32}})
    with pytest.raises(CheckpointError, match="not a plain name inside the folder"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version=2, this release reads 1"),
        ({"step": -1}, "step=-1 is not a whole number"),
        ({"step": True}, "step=True is not a whole number"),
        ({"step": "200"}, "step='200' is not a whole number"),
        ({"surprise": 1}, r"\['surprise'\] are missing or unknown"),
        ({"tensors": {"w": {"shape": [2, -2], "dtype": "float32"}}}, "tensors.w.shape=-2"),
        ({"tensors": {"w": {"shape": 2, "dtype": "float32"}}}, "tensors.w.shape is a int, not a list"),
        ({"tensors": {"w": {"shape": [2]}}}, "tensors.w must have shape and dtype"),
        ({"files": {"f": {"size": 1, "sha256": "xyz"}}}, "files.f.sha256='xyz' is not a SHA-256"),
        ({"files": {"f": [1]}}, "files.f must have size and sha256"),
        ({"rank_states": [1]}, r"rank_states\[0\] is a int, not a dict"),
        ({"state": []}, "state is a list, not a dict"),
    ],
)
def test_wrong_field_is_named(tmp_path, changes, message):
    write_manifest(tmp_path, MANIFEST)
    edit_manifest(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(tmp_path)


def test_manifest_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="is a list, not a dict"):
        read_manifest(tmp_path)


def test_deeply_nested_json_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_manifest(tmp_path)
