import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from moe_framework.checkpoint import safe_pickle
from moe_framework.checkpoint.safe_pickle import read_metadata
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.steps import empty_like, example_tensors, make_store, rewrite_checksums, save_step


class Touch:
    """Unpickling an instance creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def metadata(**changes: object) -> Metadata:
    tensor = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32), torch.Size([2]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]
    )
    fields: dict = {
        "state_dict_metadata": {"w": tensor},
        "storage_data": {MetadataIndex("w", [0]): _StorageInfo("__0_0.distcp", 0, 10)},
    }
    return Metadata(**{**fields, **changes})


def write(step_dir: Path, content: object) -> None:
    data = content if isinstance(content, bytes) else pickle.dumps(content)
    (step_dir / ".metadata").write_bytes(data)


def test_genuine_metadata_is_read(tmp_path):
    write(tmp_path, metadata())
    read = read_metadata(tmp_path)
    assert read.state_dict_metadata == metadata().state_dict_metadata
    assert read.storage_data == metadata().storage_data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint16])
def test_dtypes_are_read(tmp_path, dtype):
    tensor = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size([]), [])
    write(tmp_path, metadata(state_dict_metadata={"w": tensor}))
    read = read_metadata(tmp_path).state_dict_metadata["w"]
    assert isinstance(read, TensorStorageMetadata)
    assert read.properties.dtype == dtype


def test_payload_does_not_run_although_every_checksum_matches(tmp_path):
    step_dir, marker = save_step(tmp_path), tmp_path / "ran"
    write(step_dir, metadata(planner_data=Touch(marker)))
    rewrite_checksums(step_dir)
    tensors = empty_like(example_tensors())
    with pytest.raises(CheckpointError, match=r"\.metadata: refused: it wants posix\.system.*Nothing was run"):
        make_store(tmp_path).load(step_dir, tensors)
    assert not marker.exists()
    assert all(torch.all(tensor == 7) for tensor in tensors.values())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_payload_is_refused_in_every_protocol(tmp_path, protocol):
    marker = tmp_path / "ran"
    write(tmp_path, pickle.dumps(Touch(marker), protocol=protocol))
    with pytest.raises(CheckpointError, match=r"it wants .*system"):
        read_metadata(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "builtins eval",
        "builtins getattr",
        "builtins exec",
        "torch load",
        "torch hub",
        "torch._utils _rebuild_tensor_v2",
        "torch.serialization load",
        "collections OrderedDict",
        "copyreg _reconstructor",
        "torch.distributed.checkpoint.metadata os.system",
        "torch.distributed.checkpoint.metadata os",
        "torch.distributed.checkpoint.filesystem pickle.loads",
        "torch Size.__init__.__globals__",
    ],
)
def test_other_names_are_refused(tmp_path, name):
    module, attribute = name.split(" ")
    for program in (
        f"c{module}\n{attribute}\n.".encode(),
        b"\x80\x04" + _unicode(module) + _unicode(attribute) + b"\x93.",
        f"(i{module}\n{attribute}\n.".encode(),
    ):
        write(tmp_path, program)
        with pytest.raises(CheckpointError, match=f"it wants {module}.{attribute}"):
            read_metadata(tmp_path)


def _unicode(text: str) -> bytes:
    return b"\x8c" + struct.pack("B", len(text)) + text.encode()


def test_bytes_entries_are_refused(tmp_path):
    write(tmp_path, metadata(state_dict_metadata={"w": BytesStorageMetadata()}))
    with pytest.raises(
        CheckpointError, match=r"it wants torch\.distributed\.checkpoint\.metadata\.BytesStorageMetadata"
    ):
        read_metadata(tmp_path)


def test_entries_of_bytes_are_told_from_tensors_where_megatron_writes_them(tmp_path):
    entries = {**metadata().state_dict_metadata, "common": BytesStorageMetadata()}
    storage = {**metadata().storage_data, MetadataIndex("common"): _StorageInfo("__0_0.distcp", 10, 5)}
    write(tmp_path, metadata(state_dict_metadata=entries, storage_data=storage))
    read = read_metadata(tmp_path, allow_bytes=True)
    assert read.state_dict_metadata == entries
    assert read.storage_data == storage


def test_what_megatron_leaves_of_a_plan_is_inert(tmp_path):
    plan = SavePlan([WriteItem(MetadataIndex("w", [0]), WriteItemType.SHARD)])
    genuine = metadata()
    genuine.all_local_plans = [plan]  # pyright: ignore[reportAttributeAccessIssue]
    write(tmp_path, genuine)
    assert read_metadata(tmp_path, allow_bytes=True).state_dict_metadata == genuine.state_dict_metadata
    with pytest.raises(CheckpointError, match=r"it wants torch\.distributed\.checkpoint\.planner\.SavePlan"):
        read_metadata(tmp_path)


def test_payload_beside_entries_of_bytes_is_refused(tmp_path):
    marker = tmp_path / "ran"
    write(tmp_path, metadata(state_dict_metadata={"b": BytesStorageMetadata()}, planner_data=Touch(marker)))
    with pytest.raises(CheckpointError, match=r"refused: it wants posix\.system"):
        read_metadata(tmp_path, allow_bytes=True)
    assert not marker.exists()


def test_build_on_an_allowed_class_changes_no_class(tmp_path):
    # GLOBAL Metadata, then BUILD with a (None, {slot: value}) state, which pickle turns into setattr on the class.
    program = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n(N}(X\x06\x00\x00\x00hackedK\x01utb."
    write(tmp_path, program)
    with pytest.raises(CheckpointError, match="not DCP metadata"):
        read_metadata(tmp_path)
    assert not hasattr(Metadata, "hacked")
    assert not hasattr(safe_pickle._BY_NAME["Metadata"], "hacked")


def test_calling_allowed_classes_with_anything_is_inert(tmp_path):
    # torch.Size(torch.Size), _get_layout([...]): the stand-ins keep the arguments and do nothing.
    program = b"ctorch\nSize\n(ctorch.serialization\n_get_layout\n(](K\x01etRtR."
    write(tmp_path, program)
    with pytest.raises(CheckpointError, match="expected Metadata, found Size"):
        read_metadata(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04",
        b"garbage",
        pickle.dumps(None),
        pickle.dumps({"a": 1}),
        pickle.dumps(metadata())[:-20],
        pickle.dumps(metadata(storage_data=None)),
        pickle.dumps(metadata(storage_data={MetadataIndex("w", None): _StorageInfo("f", 0, 1)})),
        pickle.dumps(metadata(storage_data={MetadataIndex("w", [0]): _StorageInfo("f", -1, 1)})),
        pickle.dumps(metadata(storage_data={MetadataIndex("w", [0]): _StorageInfo("f", 0, 1, ["stream.zstd/1"])})),
        pickle.dumps(metadata(storage_data={"w": _StorageInfo("f", 0, 1)})),
        pickle.dumps(metadata(state_dict_metadata={"w": torch.Size([1])})),
        pickle.dumps(metadata(state_dict_metadata={1: metadata().state_dict_metadata["w"]})),
        b"\x80\x02Pspam\n.",
    ],
)
def test_what_is_not_dcp_metadata_is_refused(tmp_path, content):
    write(tmp_path, content)
    with pytest.raises(CheckpointError, match=r"\.metadata: not DCP metadata"):
        read_metadata(tmp_path)
