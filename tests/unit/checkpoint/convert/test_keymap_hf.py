"""The tables have exactly the tensors that transformers saves, and every family's numbers go there and back."""

import pytest
import torch

from moe_framework.checkpoint.convert.keymap_dcp import dcp_keymap
from moe_framework.checkpoint.convert.keymap_hf import hf_keymap
from moe_framework.checkpoint.convert.views import OurView, TheirView
from tests.unit.checkpoint.convert.folders import FAMILY_SIZES, SIZES, MemorySource, our_tensors, save_hf, their_model

pytest.importorskip("transformers", reason="needs the hf extra")
from safetensors import safe_open


@pytest.mark.parametrize("family", FAMILY_SIZES)
@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_that_transformers_saves(family: str, tied: bool, tmp_path):
    sizes = FAMILY_SIZES[family] | {"tie_embeddings": tied}
    save_hf(tmp_path, sizes)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert hf_keymap(sizes).theirs == saved


@pytest.mark.parametrize("family", FAMILY_SIZES)
def test_fused_names_and_shapes_are_those_that_transformers_has_in_memory(family: str):
    sizes = FAMILY_SIZES[family]
    held = {name: tuple(tensor.shape) for name, tensor in their_model(sizes).state_dict().items()}
    assert hf_keymap(sizes, held).theirs == held


@pytest.mark.parametrize("family", FAMILY_SIZES)
@pytest.mark.parametrize("fused", [False, True])
def test_every_number_comes_back(family: str, fused: bool):
    sizes = FAMILY_SIZES[family]
    ours = our_tensors(sizes)
    keymap = hf_keymap(sizes, ["model.layers.1.mlp.experts.gate_up_proj"] if fused else None)
    there = TheirView(MemorySource(ours, sizes), keymap)
    theirs = {name: there.read(name) for name in there.tensors()}
    assert sum(tensor.numel() for tensor in theirs.values()) == sum(tensor.numel() for tensor in ours.values())
    back = OurView(MemorySource(theirs, sizes), keymap)
    assert all(torch.equal(back.read(name), tensor) for name, tensor in ours.items())


def test_gate_is_w1_and_up_is_w3():
    ours = our_tensors(SIZES)
    view = TheirView(MemorySource(ours, SIZES), hf_keymap(SIZES))
    expert = "model.layers.2.block_sparse_moe.experts.3"
    width = SIZES["intermediate_size"]
    assert torch.equal(view.read(f"{expert}.w1.weight"), ours["layers.2.moe.experts.gate_up"][3, :width])
    assert torch.equal(view.read(f"{expert}.w3.weight"), ours["layers.2.moe.experts.gate_up"][3, width:])
    assert torch.equal(view.read(f"{expert}.w2.weight"), ours["layers.2.moe.experts.down"][3])


@pytest.mark.parametrize("family", FAMILY_SIZES)
def test_our_own_names_are_the_models(family: str):
    keymap = dcp_keymap(FAMILY_SIZES[family])
    assert keymap.theirs == {f"model.{name}": shape for name, shape in keymap.ours.items()}
