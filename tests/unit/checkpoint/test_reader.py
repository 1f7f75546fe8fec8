import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor  # noqa: F401  # registers classes that weights_only then admits

from moe_framework.checkpoint import reader
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
        (b"\x80\x04\x8c\x05torch\x8c\x04load\x93.", "the opcode STACK_GLOBAL"),
        (b"(ios\nsystem\n.", "the opcode INST"),
    ],
)
def test_names_that_no_plain_tensor_needs_are_refused_before_torch_sees_them(tmp_path, monkeypatch, program, message):
    step_dir, tensors = forge(tmp_path, archive(program))
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("reached torch.load"))
    with pytest.raises(CheckpointError, match=message):
        make_store(tmp_path).load(step_dir, tensors)


def test_two_pickles_are_refused(tmp_path):
    step_dir, tensors = forge(tmp_path, archive(b"\x80\x02N.", copies=2))
    with pytest.raises(CheckpointError, match="2 pickles where one is expected"):
        make_store(tmp_path).load(step_dir, tensors)


def test_compressed_archives_are_refused(tmp_path):
    step_dir, tensors = forge(tmp_path, archive(b"\x80\x02N.", compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(CheckpointError, match="it is compressed"):
        make_store(tmp_path).load(step_dir, tensors)


@pytest.mark.parametrize("legacy", [True, False])
def test_a_tensor_is_loaded_with_weights_only(tmp_path, monkeypatch, legacy):
    seen = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: seen.append(kwargs) or load(*args, **kwargs))
    data = saved(torch.ones(3, 2), _use_new_zipfile_serialization=not legacy)
    step_dir, tensors = forge(tmp_path, data)
    if legacy:
        with pytest.raises(CheckpointError, match="refused: File is not a zip file"):
            make_store(tmp_path).load(step_dir, tensors)
        return
    make_store(tmp_path).load(step_dir, tensors)
    assert seen == [{"map_location": "cpu", "weights_only": True}]


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
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
def test_every_dtype_round_trips(tmp_path, dtype):
    tensors = {"w": torch.arange(12).reshape(4, 3).to(dtype)}
    store = make_store(tmp_path)
    store.save(1, tensors, {})
    target = {"w": torch.zeros(4, 3).to(dtype)}
    store.load(tmp_path / "step_00000001", target)
    assert torch.equal(target["w"].view(torch.uint8), tensors["w"].view(torch.uint8))
    assert read_manifest(tmp_path / "step_00000001").tensors["w"].dtype == str(dtype).removeprefix("torch.")
