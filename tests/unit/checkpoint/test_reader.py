import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import cast

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moe_framework.checkpoint import reader
from moe_framework.checkpoint.convert.boxes import parts
from moe_framework.checkpoint.manifest import read_manifest
from moe_framework.checkpoint.safe_pickle import read_metadata
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.steps import empty_like, make_store, rewrite_checksums


class Touch:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def forge(directory: Path, data: bytes) -> tuple[Path, dict[str, torch.Tensor]]:
    """A step of one tensor whose stored bytes are replaced, metadata and checksums adapted."""
    tensors = {"w": torch.ones(3, 2)}
    make_store(directory).save(1, tensors, {})
    step_dir = directory / "step_00000001"
    metadata = read_metadata(step_dir)
    (info,) = metadata.storage_data.values()
    info.length = len(data)
    (step_dir / "__0_0.distcp").write_bytes(data)
    (step_dir / ".metadata").write_bytes(pickle.dumps(metadata))
    rewrite_checksums(step_dir)
    return step_dir, empty_like(tensors)


def archive(program: bytes, *, copies: int = 1, compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        for copy in range(copies):
            file.writestr(f"archive{copy}/data.pkl", program)
        file.writestr("archive0/version", "3\n")
    return stream.getvalue()


def saved(value: object, **kwargs) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **kwargs)
    return stream.getvalue()


def test_forged_step_with_the_same_content_loads(tmp_path):
    step_dir, tensors = forge(tmp_path, saved(torch.full((3, 2), 5.0)))
    make_store(tmp_path).load(step_dir, tensors)
    assert torch.equal(tensors["w"], torch.full((3, 2), 5.0))


@pytest.mark.parametrize("wrap", [pickle.dumps, saved, lambda value: archive(pickle.dumps(value, protocol=2))])
def test_payload_in_a_tensor_file_does_not_run(tmp_path, wrap):
    marker = tmp_path / "ran"
    step_dir, tensors = forge(tmp_path, wrap(Touch(marker)))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: 'w' is refused: .*Nothing was run"):
        make_store(tmp_path).load(step_dir, tensors)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"\x80\x02cbuiltins\neval\nX\x03\x00\x00\x001+1\x85R.", "it wants builtins.eval"),
        (b"\x80\x02ctorch\nload\n.", "it wants torch.load"),
        (b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n.", "it wants torch._tensor._rebuild_from_type_v2"),
        (b"\x80\x02ctorch.distributed.device_mesh\nDeviceMesh\n.", "it wants torch.distributed.device_mesh.DeviceMesh"),
        (b"\x80\x04\x8c\x05torch\x8c\x04load\x93.", "it wants torch.load"),
        (b"(ios\nsystem\n.", "it wants os.system"),
        (b"\x80\x02\x82\x01.", "opcodes that torch.save does not write"),
    ],
)
def test_names_that_no_plain_tensor_needs_are_refused(tmp_path, program, message):
    step_dir, tensors = forge(tmp_path, archive(program))
    with pytest.raises(CheckpointError, match=message):
        make_store(tmp_path).load(step_dir, tensors)


def test_two_pickles_are_refused(tmp_path):
    step_dir, tensors = forge(tmp_path, archive(b"\x80\x02N.", copies=2))
    with pytest.raises(CheckpointError, match="an archive of one plain tensor has one small pickle"):
        make_store(tmp_path).load(step_dir, tensors)


def test_compressed_archives_are_refused(tmp_path):
    step_dir, tensors = forge(tmp_path, archive(b"\x80\x02N.", compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(CheckpointError, match="it is compressed"):
        make_store(tmp_path).load(step_dir, tensors)


def test_archives_of_before_pytorch_1_6_are_refused(tmp_path):
    step_dir, tensors = forge(tmp_path, saved(torch.ones(3, 2), _use_new_zipfile_serialization=False))
    with pytest.raises(CheckpointError, match="refused: File is not a zip file"):
        make_store(tmp_path).load(step_dir, tensors)


def test_torch_never_unpickles(tmp_path, monkeypatch):
    step_dir, tensors = forge(tmp_path, saved(torch.ones(3, 2)))
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("reached torch.load"))
    make_store(tmp_path).load(step_dir, tensors)
    assert torch.equal(tensors["w"], torch.ones(3, 2))


class Target:
    """A planner with one tensor to fill."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            self.tensor = self.tensor.narrow(dim, offset, length)
        return self.tensor

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do."""


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_of_four_reads_a_quarter_of_what_one_rank_saved(tmp_path, monkeypatch, dim):
    # A row of an expert is longer than the gaps that reading goes over.
    whole = torch.arange(8 * 8 * 2**16, dtype=torch.float32).reshape(8, 8, 2**16)
    make_store(tmp_path).save(1, {"w": whole}, {})
    step_dir = tmp_path / "step_00000001"
    metadata = read_metadata(step_dir)
    tensors = reader.TensorReader(step_dir, metadata)
    tensors.set_up_storage_reader(metadata, is_coordinator=True)
    shard = whole.chunk(4, dim)[2]
    place = ChunkStorageMetadata(torch.Size([4 if axis == dim else 0 for axis in range(3)]), shard.shape)
    stored = metadata.state_dict_metadata["w"]
    assert isinstance(stored, TensorStorageMetadata)
    items = create_read_items_for_chunk_list("w", stored, [place])

    counts, read = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: counts.append(read(*args)) or counts[-1])
    filled = torch.zeros_like(shard)
    tensors.read_data(LoadPlan(items), cast(LoadPlanner, Target(filled))).wait()
    assert torch.equal(filled, shard)
    assert shard.nbytes <= sum(counts) < shard.nbytes + 2**16


def test_a_large_shard_is_read_in_parts(tmp_path, monkeypatch):
    value = torch.arange(64 * 32, dtype=torch.float32).reshape(64, 32)
    make_store(tmp_path).save(1, {"w": value, "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 3)}, {})
    regions, read = [], reader.read_item
    monkeypatch.setattr(reader, "parts", lambda info: parts(info, limit=1024))
    monkeypatch.setattr(reader, "read_item", lambda *args: regions.append(args[-1]) or read(*args))
    tensors = {"w": torch.zeros(64, 32), "scalar": torch.zeros(()), "empty": torch.zeros(0, 3)}
    make_store(tmp_path).load(tmp_path / "step_00000001", tensors)
    assert torch.equal(tensors["w"], value)
    assert tensors["scalar"] == 3
    assert [region[0] for region in regions if region and region[0].stop] == [slice(i, i + 8) for i in range(0, 64, 8)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"w": torch.ones(3, 2)}, "it is not a plain tensor"),
        (torch.ones(3, 2).to_sparse(), "no plain tensor needs"),
        (torch.nn.Parameter(torch.ones(3, 2)), "no plain tensor needs"),
        (torch.ones(2, 3), r"is \[2, 3\] torch.float32 in the file, \[3, 2\] torch.float32 in .metadata"),
        (torch.ones(3, 2, dtype=torch.float64), r"is \[3, 2\] torch.float64 in the file"),
    ],
)
def test_anything_but_the_announced_tensor_is_refused(tmp_path, value, message):
    step_dir, tensors = forge(tmp_path, saved(value))
    with pytest.raises(CheckpointError, match=message):
        make_store(tmp_path).load(step_dir, tensors)
    assert torch.all(tensors["w"] == 7)


def test_planner_has_no_way_to_unpickle_bytes(tmp_path):
    index = MetadataIndex("w")
    size = torch.Size([0])
    item = ReadItem(LoadItemType.BYTE_IO, index, size, index, size, size)
    marker = tmp_path / "ran"
    with pytest.raises(CheckpointError, match="'w' is stored as bytes"):
        reader.TensorLoadPlanner().load_bytes(item, io.BytesIO(pickle.dumps(Touch(marker))))
    assert not marker.exists()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.int32,
        torch.uint16,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
    ],
)
def test_every_dtype_round_trips(tmp_path, dtype):
    tensors = {"w": torch.arange(12).reshape(4, 3).to(dtype)}
    store = make_store(tmp_path)
    store.save(1, tensors, {})
    target = {"w": torch.zeros(4, 3).to(dtype)}
    store.load(tmp_path / "step_00000001", target)
    assert torch.equal(target["w"].view(torch.uint8), tensors["w"].view(torch.uint8))
    assert read_manifest(tmp_path / "step_00000001").tensors["w"].dtype == str(dtype).removeprefix("torch.")
