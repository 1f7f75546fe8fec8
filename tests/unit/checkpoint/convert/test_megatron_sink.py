"""Writing checkpoints for Megatron-Core. The keys of the expectations were printed by Megatron-Core 0.19.2."""

import io
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from moe_framework.checkpoint.convert.base import TensorInfo
from moe_framework.checkpoint.convert.boxes import parts
from moe_framework.checkpoint.convert.keymap_megatron import megatron_keymap
from moe_framework.checkpoint.convert.megatron_sink import MegatronSink, extra_state_keys
from moe_framework.checkpoint.convert.megatron_source import MegatronSource
from tests.unit.checkpoint.convert.megatron_checkpoints import DEEPSEEK, MIXTRAL, megatron_tensors, our_tensors


def write(folder: Path, tensors: dict[str, Tensor], sizes: dict, part_bytes: int = 100) -> Path:
    folder.mkdir()
    sink = MegatronSink(folder, iteration=5, max_file_bytes=2000)
    infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    sink.begin(infos, sizes)
    for name, info in infos.items():
        for region in parts(info, part_bytes):
            sink.write(name, tuple(part.start for part in region), tensors[name][region])
    sink.finish()
    return folder


def read_all(folder: Path, names: dict[str, object]) -> dict[str, object]:
    """Read with torch's own reader."""
    load(names, storage_reader=FileSystemReader(folder), no_dist=True)
    return names


def test_torch_reads_the_tensors_back(tmp_path):
    tensors = megatron_tensors(our_tensors(MIXTRAL), MIXTRAL)
    folder = write(tmp_path / "out", tensors, MIXTRAL)
    empty: dict[str, object] = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    for name, tensor in read_all(folder, empty).items():
        assert torch.equal(tensor, tensors[name]), name  # pyright: ignore[reportArgumentType]
    assert len(list(folder.glob("*.distcp"))) > 1


def test_source_reads_the_same_tensors_sizes_and_iteration(tmp_path):
    tensors = megatron_tensors(our_tensors(MIXTRAL), MIXTRAL)
    source = MegatronSource(write(tmp_path / "out", tensors, MIXTRAL))
    assert source.config() == MIXTRAL
    assert source.iteration == 5
    for name, tensor in tensors.items():
        assert torch.equal(source.read(name), tensor), name


def test_a_stack_of_layers_has_a_state_for_each_layer_and_expert():
    expected = {"decoder.final_layernorm._extra_state/shard_0_1"}
    for module in ("self_attention.linear_qkv", "self_attention.linear_proj", "pre_mlp_layernorm"):
        expected |= {f"decoder.layers.{module}._extra_state/shard_{layer}_2" for layer in range(2)}
    for linear in ("linear_fc1", "linear_fc2"):
        expected |= {
            f"decoder.layers.mlp.experts.experts.{linear}._extra_state/shard_{layer}.{expert}_2.3"
            for layer in range(2)
            for expert in range(3)
        }
    keys = extra_state_keys(megatron_keymap(MIXTRAL).theirs)
    assert set(keys) == expected
    assert len(keys) == len(expected)


def test_layers_by_number_have_a_state_for_each_expert():
    attention = ("linear_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
    expected = {"decoder.final_layernorm._extra_state/shard_0_1"}
    for layer in range(2):
        prefix = f"decoder.layers.{layer}"
        expected |= {f"{prefix}.self_attention.{name}._extra_state/shard_0_1" for name in attention}
        expected.add(f"{prefix}.input_layernorm._extra_state/shard_0_1")
    modules = ("0.mlp", "1.mlp.shared_experts")
    for linear in ("linear_fc1", "linear_fc2"):
        expected |= {f"decoder.layers.{module}.{linear}._extra_state/shard_0_1" for module in modules}
        expected |= {f"decoder.layers.1.mlp.experts.experts.{linear}._extra_state/shard_{i}_3" for i in range(3)}
    expected.add("decoder.layers.1.pre_mlp_layernorm._extra_state/shard_0_1")
    assert set(extra_state_keys(megatron_keymap(DEEPSEEK).theirs)) == expected


def test_states_are_lists_of_an_empty_tensor_and_take_no_room_each(tmp_path):
    folder = write(tmp_path / "out", megatron_tensors(our_tensors(MIXTRAL), MIXTRAL), MIXTRAL)
    keys = extra_state_keys(megatron_keymap(MIXTRAL).theirs)
    names: dict[str, object] = {key: io.BytesIO() for key in keys}
    for state in read_all(folder, names).values():
        assert isinstance(state, list)
        assert [(tensor.dtype, tensor.numel()) for tensor in state] == [(torch.uint8, 0)]
    storage = FileSystemReader(folder).read_metadata().storage_data
    assert len({info.offset for index, info in storage.items() if index.fqn in keys}) == 1


@pytest.mark.parametrize(("sizes", "by_layer"), [(MIXTRAL, False), (DEEPSEEK, True)])
def test_common_state_tells_megatron_version_iteration_and_naming(tmp_path, sizes, by_layer):
    tensors = {name: torch.zeros(shape) for name, shape in megatron_keymap(sizes).theirs.items()}
    folder = write(tmp_path / "out", tensors, sizes)
    key = "common_state/shard_0_1"
    (state,) = read_all(folder, {key: io.BytesIO()})[key]  # pyright: ignore[reportGeneralTypeIssues]
    assert state["checkpoint_version"] == 3.0
    assert state["iteration"] == 5
    assert state["content_metadata"] == {"singleton_local_shards": False, "non_homogeneous_layers": by_layer}
    assert state["args"].num_layers == 2
    assert state["args"].num_attention_heads == 4
    assert json.loads((folder / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
    }


def test_checkpoint_is_incomplete_until_it_is_finished(tmp_path):
    sink = MegatronSink(tmp_path)
    sink.begin({"output_layer.weight": TensorInfo((2, 2), torch.float32)}, MIXTRAL)
    sink.write("output_layer.weight", (0, 0), torch.zeros(2, 2))
    assert not (tmp_path / "metadata.json").exists()
    assert not (tmp_path / ".metadata").exists()
    sink.abort()


def test_a_part_of_a_larger_buffer_is_written_without_the_rest(tmp_path):
    sink = MegatronSink(tmp_path)
    sink.begin({"output_layer.weight": TensorInfo((2, 2), torch.float32)}, MIXTRAL)
    sink.write("output_layer.weight", (0, 0), torch.zeros(500_000, 2)[:2])
    sink.finish()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 100_000
