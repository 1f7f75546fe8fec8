"""Reading Megatron-Core's torch_dist checkpoints with neither Megatron nor a GPU."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from moe_framework.checkpoint.convert.inspect import Progress, progress_of
from moe_framework.checkpoint.convert.keymap_megatron import megatron_keymap
from moe_framework.checkpoint.convert.megatron_source import MegatronSource, find_checkpoint
from moe_framework.checkpoint.convert.views import OurView
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.convert.megatron_checkpoints import MIXTRAL, megatron_tensors, our_tensors, save_torch_dist


class Touch:
    """Unpickling an instance creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return save_torch_dist(tmp_path / "checkpoint", megatron_tensors(our_tensors(MIXTRAL), MIXTRAL))


def edit_metadata(folder: Path, edit) -> None:
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("layout", ["stacked", "by_layer", "single", "grouped", "sequential"])
def test_every_layout_is_read_as_our_tensors(tmp_path, layout):
    ours = our_tensors(MIXTRAL)
    source = MegatronSource(save_torch_dist(tmp_path, megatron_tensors(ours, MIXTRAL, layout)))
    assert source.config() == MIXTRAL
    assert source.iteration == 7
    view = OurView(source, megatron_keymap(source.config(), source.tensors()))
    for name, tensor in ours.items():
        assert torch.equal(view.read(name), tensor), name


def test_a_region_is_read(checkpoint):
    source = MegatronSource(checkpoint)
    name = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    region = (slice(1, 2), slice(0, 2), slice(3, 9), slice(2, 5))
    assert torch.equal(source.read(name, region), source.read(name)[region])


def test_optimizer_is_not_offered_and_the_wrapper_prefix_is_dropped(tmp_path):
    tensors = {f"module.{name}": tensor for name, tensor in megatron_tensors(our_tensors(MIXTRAL), MIXTRAL).items()}
    optimizer = {
        "optimizer.state.exp_avg.module.output_layer.weight": torch.zeros(1),
        "chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.param": torch.zeros(1),
    }
    source = MegatronSource(save_torch_dist(tmp_path / "run", tensors | optimizer))
    assert progress_of(source) == Progress(7, optimizer=True)
    assert progress_of(MegatronSource(save_torch_dist(tmp_path / "weights", tensors))) == Progress(7, optimizer=False)
    assert source.tensors().keys() == megatron_keymap(MIXTRAL).theirs.keys()
    assert torch.equal(source.read("output_layer.weight"), tensors["module.output_layer.weight"])


def test_latest_checkpoint_of_a_run_is_found(tmp_path, checkpoint):
    assert find_checkpoint(checkpoint) == checkpoint
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20\n")
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000020"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert find_checkpoint(tmp_path) == tmp_path / "release"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="is no iteration"):
        find_checkpoint(tmp_path)


def test_crafted_metadata_is_refused_and_does_not_run(tmp_path, checkpoint):
    marker = tmp_path / "ran"
    edit_metadata(checkpoint, lambda metadata: setattr(metadata, "planner_data", Touch(marker)))
    with pytest.raises(CheckpointError, match=r"\.metadata: refused: it wants posix\.system.*Nothing was run"):
        MegatronSource(checkpoint)
    assert not marker.exists()


def test_crafted_state_of_a_module_is_not_read(tmp_path):
    marker = tmp_path / "ran"
    tensors = {
        **megatron_tensors(our_tensors(MIXTRAL), MIXTRAL),
        "decoder.final_layernorm._extra_state/shard_1_2": Touch(marker),
    }
    source = MegatronSource(save_torch_dist(tmp_path / "checkpoint", tensors))
    for name in source.tensors():
        source.read(name)
    assert not marker.exists()


def test_crafted_tensor_is_refused_and_does_not_run(tmp_path, checkpoint):
    marker = tmp_path / "ran"
    torch.save(Touch(marker), tmp_path / "payload")
    payload = (tmp_path / "payload").read_bytes()
    name = "decoder.final_layernorm.weight"

    def redirect(metadata: Metadata) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == name)
        metadata.storage_data[index] = _StorageInfo("__9_0.distcp", 0, len(payload))

    (checkpoint / "__9_0.distcp").write_bytes(payload)
    edit_metadata(checkpoint, redirect)
    source = MegatronSource(checkpoint)
    with pytest.raises(CheckpointError, match=r"refused: .*posix\.system"):
        source.read(name)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (_StorageInfo("../secret", 0, 1), "no plain file"),
        (_StorageInfo("/etc/passwd", 0, 1), "no plain file"),
        (_StorageInfo("link", 0, 1), "no plain file"),
        (_StorageInfo("absent", 0, 1), "missing"),
        (_StorageInfo("__0_0.distcp", 2**40, 1), "truncated"),
    ],
)
def test_metadata_cannot_lead_outside_the_files(tmp_path, checkpoint, info, message):
    (tmp_path / "secret").write_text("secret")
    (checkpoint / "link").symlink_to(tmp_path / "secret")

    def redirect(metadata: Metadata) -> None:
        metadata.storage_data[next(iter(metadata.storage_data))] = info

    edit_metadata(checkpoint, redirect)
    with pytest.raises(CheckpointError, match=message):
        MegatronSource(checkpoint)


def test_a_gap_between_chunks_is_found(checkpoint):
    def drop(metadata: Metadata) -> None:
        tensor = metadata.state_dict_metadata["output_layer.weight"]
        tensor.size = torch.Size([12, 8])  # pyright: ignore[reportAttributeAccessIssue]

    edit_metadata(checkpoint, drop)
    with pytest.raises(CheckpointError, match=r"'output_layer\.weight' do not fill it"):
        MegatronSource(checkpoint)


def test_truncated_file_is_found(checkpoint):
    file = checkpoint / "__0_0.distcp"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="truncated"):
        MegatronSource(checkpoint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no complete torch_dist checkpoint"),
        ("{", "cannot be read"),
        ("[]", "only torch_dist"),
        (json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}), "zarr.*only torch_dist"),
        (json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 2}), "version 1, is read"),
    ],
)
def test_other_backends_and_incomplete_checkpoints_are_refused(checkpoint, text, message):
    (checkpoint / "metadata.json").unlink()
    if text is not None:
        (checkpoint / "metadata.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        MegatronSource(checkpoint)
