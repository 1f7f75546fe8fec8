import os
import pickle
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from moe_framework.checkpoint.manifest import read_manifest
from moe_framework.checkpoint.safe_pickle import read_metadata
from moe_framework.checkpoint.verify import check_metadata, damaged_files
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.steps import empty_like, example_tensors, make_store, rewrite_checksums, save_step


def load_expecting_error(directory, step_dir, message, tensors=None):
    tensors = empty_like(example_tensors()) if tensors is None else tensors
    with pytest.raises(CheckpointError, match=message):
        make_store(directory).load(step_dir, tensors)
    assert all(torch.all(tensor == 7) for tensor in tensors.values())


def test_truncated_file_is_named(tmp_path):
    step_dir = save_step(tmp_path)
    path = step_dir / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    load_expecting_error(tmp_path, step_dir, r"__0_0\.distcp: \d+ bytes, \d+ in the manifest: truncated")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_flipped_bit_is_named(tmp_path, name):
    step_dir = save_step(tmp_path)
    data = bytearray((step_dir / name).read_bytes())
    data[len(data) // 2] ^= 1
    (step_dir / name).write_bytes(data)
    load_expecting_error(tmp_path, step_dir, rf"{name}: its SHA-256 differs from the manifest's: damaged")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_deleted_file_is_named(tmp_path, name):
    step_dir = save_step(tmp_path)
    (step_dir / name).unlink()
    load_expecting_error(tmp_path, step_dir, f"{name}: missing.*resume from another step")


def test_every_damaged_file_is_listed(tmp_path):
    step_dir = save_step(tmp_path)
    (step_dir / "__0_0.distcp").unlink()
    (step_dir / ".metadata").unlink()
    load_expecting_error(tmp_path, step_dir, r"(?s)\.metadata: missing.*__0_0\.distcp: missing")


def test_link_out_of_the_folder_is_refused(tmp_path):
    step_dir = save_step(tmp_path)
    (step_dir / "__0_0.distcp").rename(tmp_path / "outside")
    (step_dir / "__0_0.distcp").symlink_to(tmp_path / "outside")
    load_expecting_error(tmp_path, step_dir, r"__0_0\.distcp: not a regular file")


def test_pipe_is_refused_and_does_not_block(tmp_path):
    step_dir = save_step(tmp_path)
    (step_dir / ".metadata").unlink()
    os.mkfifo(step_dir / ".metadata")
    load_expecting_error(tmp_path, step_dir, r"\.metadata: not a regular file")


def test_files_are_shared_out_once(tmp_path):
    step_dir = save_step(tmp_path)
    manifest = read_manifest(step_dir)
    for name in manifest.files:
        (step_dir / name).unlink()
    shares = [damaged_files(step_dir, manifest, rank=rank, num_ranks=3) for rank in range(3)]
    assert sorted(len(share) for share in shares) == [0, 1, 1]


def test_other_model_is_refused_with_every_difference(tmp_path):
    step_dir = save_step(tmp_path)
    tensors = empty_like(example_tensors())
    tensors["model.experts"] = torch.full((8, 6, 3), 7.0)
    tensors["model.head"] = torch.full((5, 3), 7.0)
    tensors["model.new"] = torch.full((1,), 7.0)
    del tensors["model.scale"]
    load_expecting_error(
        tmp_path,
        step_dir,
        r"step_00000200: 'model\.experts' is \[4, 6, 3\] on disk, \[8, 6, 3\] in the model\.\n"
        r"step_00000200: 'model\.head' is bfloat16 on disk, float32 in the model\.\n"
        r"step_00000200: 'model\.new' is not on disk, but in the model\.\n"
        r"step_00000200: 'model\.scale' is on disk, but not in the model\. Load with the saved config\.yaml\.",
        tensors,
    )


def test_extra_names_are_allowed_only_where_asked(tmp_path):
    step_dir = save_step(tmp_path)
    weights = {name: tensor for name, tensor in empty_like(example_tensors()).items() if name.startswith("model.")}
    load_expecting_error(tmp_path, step_dir, "'optimizer.exp_avg.head' is on disk, but not in the model", weights)
    make_store(tmp_path).load(step_dir, weights, allow_extra=lambda name: name.startswith("optimizer."))
    assert all(torch.equal(tensor, example_tensors()[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "manifest.json", "sub/../__0_0.distcp"])
def test_metadata_that_points_out_of_the_folder_is_refused(tmp_path, path):
    step_dir = save_step(tmp_path)
    (tmp_path / "secret").write_bytes((step_dir / "__0_0.distcp").read_bytes())
    metadata = read_metadata(step_dir)
    for info in metadata.storage_data.values():
        info.relative_path = path
    (step_dir / ".metadata").write_bytes(pickle.dumps(metadata))
    rewrite_checksums(step_dir)
    load_expecting_error(tmp_path, step_dir, rf"it refers to the file '{path}', which is not in the manifest")


def chunk(offset: int, size: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([offset, 0, 0]), torch.Size([size, 6, 3]))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "do not fill it"),
        ([chunk(0, 3)], "do not fill it"),
        ([chunk(0, 2), chunk(1, 2)], "overlap"),
        ([chunk(0, 2), chunk(0, 2)], "overlap"),
        ([chunk(0, 5)], "lies outside the tensor"),
        ([chunk(2, 2), chunk(1, 1), chunk(0, 1)], None),
        ([chunk(0, 4), chunk(4, 0)], None),
        ([ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))], "another number of dimensions"),
    ],
)
def test_chunks_must_fill_a_tensor_exactly(tmp_path, chunks, message):
    step_dir = save_step(tmp_path)
    metadata = read_metadata(step_dir)
    tensor = metadata.state_dict_metadata["model.experts"]
    assert isinstance(tensor, TensorStorageMetadata)
    some_place = next(iter(metadata.storage_data.values()))
    places = {
        replace(index, offset=part.offsets): some_place
        for part in chunks
        for index in metadata.storage_data
        if index.fqn == "model.experts"
    }
    forged = Metadata(
        {**metadata.state_dict_metadata, "model.experts": replace(tensor, chunks=chunks)},
        storage_data={**metadata.storage_data, **places},
    )
    if message is None:
        check_metadata(step_dir, read_manifest(step_dir), forged)
        return
    with pytest.raises(CheckpointError, match=message):
        check_metadata(step_dir, read_manifest(step_dir), forged)


def test_chunk_that_is_stored_nowhere_is_refused(tmp_path):
    step_dir = save_step(tmp_path)
    metadata = read_metadata(step_dir)
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "model.head"}
    with pytest.raises(CheckpointError, match=r"a chunk of 'model\.head' is stored nowhere"):
        check_metadata(step_dir, read_manifest(step_dir), metadata)


def test_bytes_past_the_end_of_a_file_are_refused(tmp_path):
    step_dir = save_step(tmp_path)
    metadata = read_metadata(step_dir)
    next(iter(metadata.storage_data.values())).length = 1 << 40
    with pytest.raises(CheckpointError, match=r"past the end of __0_0\.distcp"):
        check_metadata(step_dir, read_manifest(step_dir), metadata)


def test_metadata_of_another_model_is_refused(tmp_path):
    step_dir = save_step(tmp_path)
    metadata = read_metadata(step_dir)
    del metadata.state_dict_metadata["model.head"]
    with pytest.raises(CheckpointError, match=r"'model\.head' is missing in it"):
        check_metadata(step_dir, read_manifest(step_dir), metadata)
