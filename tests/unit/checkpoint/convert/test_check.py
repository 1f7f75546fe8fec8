"""Everything that is wrong with a checkpoint is said at once."""

import pytest
import torch

from moe_framework.checkpoint.convert.check import check_tensors
from moe_framework.checkpoint.convert.keymap_hf import hf_keymap
from moe_framework.checkpoint.convert.views import TheirView
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.convert.folders import SIZES, MemorySource, our_tensors

TIED = SIZES | {"tie_embeddings": True}


def their_source(sizes=SIZES) -> MemorySource:
    view = TheirView(MemorySource(our_tensors(sizes), sizes), hf_keymap(sizes))
    return MemorySource({name: view.read(name) for name in view.tensors()}, sizes)


def test_a_complete_checkpoint_passes():
    assert check_tensors(their_source(), hf_keymap(SIZES), "x") == []


def test_missing_unexpected_and_wrongly_shaped_tensors_are_all_listed():
    source = their_source()
    moe = "model.layers.1.block_sparse_moe.experts"
    del source.values[f"{moe}.0.w1.weight"]
    del source.values["lm_head.weight"]
    source.values[f"{moe}.4.w1.weight"] = torch.zeros(20, 48)
    source.values["model.norm.weight"] = torch.zeros(47)
    with pytest.raises(CheckpointError) as caught:
        check_tensors(source, hf_keymap(SIZES), "/x")
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    text = str(caught.value)
    assert f"/x: '{moe}.0.w1.weight' [20, 48] is missing." in text
    assert "/x: 'lm_head.weight' [101, 48] is missing." in text
    assert f"/x: '{moe}.4.w1.weight' [20, 48] is unexpected: the model has no such tensor." in text
    assert "/x: 'model.norm.weight' is [47], but the model's sizes need [48]." in text


def test_parts_of_a_tensor_in_different_dtypes_are_refused():
    source = their_source()
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    source.values[name] = source.values[name].bfloat16()
    with pytest.raises(CheckpointError, match=r"parts of 'layers.1.moe.experts.gate_up' have different dtypes"):
        check_tensors(source, hf_keymap(SIZES), "x")


def test_what_is_computed_anew_is_left_out_and_named():
    source = their_source()
    source.values["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(5)
    (line,) = check_tensors(source, hf_keymap(SIZES), "x")
    assert line == "model.layers.0.self_attn.rotary_emb.inv_freq: computed from rope_theta"


def test_layers_that_predict_several_tokens_are_left_out_and_named():
    sizes = SIZES | {"num_nextn_layers": 1}
    source = their_source()
    source.values["model.layers.4.eh_proj.weight"] = torch.zeros(5)
    (line,) = check_tensors(source, hf_keymap(sizes), "x")
    assert line.startswith("model.layers.4.eh_proj.weight: a layer for predicting several tokens")
    source.values["model.layers.5.eh_proj.weight"] = torch.zeros(5)
    with pytest.raises(CheckpointError, match=r"layers.5.eh_proj.weight' \[5\] is unexpected"):
        check_tensors(source, hf_keymap(sizes), "x")


def test_a_tied_head_that_is_there_must_be_the_embedding():
    source = their_source(TIED)
    assert check_tensors(source, hf_keymap(TIED), "x") == []
    source.values["lm_head.weight"] = source.values["model.embed_tokens.weight"].clone()
    assert check_tensors(source, hf_keymap(TIED), "x") == []
    source.values["lm_head.weight"][100, 47] += 1
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        check_tensors(source, hf_keymap(TIED), "x")
