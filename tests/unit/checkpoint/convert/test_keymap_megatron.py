"""The tables of Megatron-Core's names. Shapes and names of the expectations were printed by Megatron-Core 0.19.2."""

import pytest
import torch

from moe_framework.checkpoint.convert.check import check_tensors
from moe_framework.checkpoint.convert.keymap_megatron import MegatronLayout, megatron_keymap
from moe_framework.checkpoint.convert.views import OurView, TheirView
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.convert.megatron_checkpoints import (
    DEEPSEEK,
    MIXTRAL,
    InMemory,
    megatron_tensors,
    our_tensors,
)


@pytest.mark.parametrize("layout", ["stacked", "by_layer", "single", "grouped", "sequential"])
def test_every_layout_reads_as_the_same_tensors_of_ours_and_back(layout):
    ours = our_tensors(MIXTRAL)
    theirs = megatron_tensors(ours, MIXTRAL, layout)
    source = InMemory(theirs)
    keymap = megatron_keymap(MIXTRAL, theirs)
    assert check_tensors(source, keymap, "it") == []
    view = OurView(source, keymap)
    for name, tensor in ours.items():
        assert torch.equal(view.read(name), tensor), name
    back = TheirView(InMemory(ours), keymap)
    for name, tensor in theirs.items():
        assert torch.equal(back.read(name), tensor), name


def test_norms_of_the_layers_without_transformer_engine_are_found():
    ours = our_tensors(MIXTRAL)
    theirs = megatron_tensors(ours, MIXTRAL, "by_layer")
    for number in range(2):
        prefix = f"decoder.layers.{number}"
        theirs[f"{prefix}.input_layernorm.weight"] = theirs.pop(f"{prefix}.self_attention.linear_qkv.layer_norm_weight")
        theirs[f"{prefix}.mlp.linear_fc1.layer_norm_weight"] = theirs.pop(f"{prefix}.pre_mlp_layernorm.weight")
    view = OurView(InMemory(theirs), megatron_keymap(MIXTRAL, theirs))
    for name in ("layers.1.attention_norm.weight", "layers.1.moe_norm.weight"):
        assert torch.equal(view.read(name), ours[name])


@pytest.mark.parametrize(
    ("ours_name", "name"),
    [("embed.weight", "embedding.word_embeddings.weight"), ("lm_head.weight", "output_layer.weight")],
)
def test_padded_vocabulary_is_cropped_when_read_and_zero_when_written(ours_name, name):
    sizes = MIXTRAL | {"padded_vocab_size": 128}
    ours = our_tensors(sizes)
    keymap = megatron_keymap(sizes)
    padded = TheirView(InMemory(ours), keymap).read(name)
    assert padded.shape == (128, 8)
    assert torch.equal(padded[:10], ours[ours_name])
    assert not padded[10:].any()
    padded[10:] = 5.0
    theirs = megatron_tensors(ours, sizes) | {name: padded}
    assert torch.equal(OurView(InMemory(theirs), keymap).read(ours_name), ours[ours_name])


def test_swapped_experts_do_not_read_as_equal():
    ours = our_tensors(MIXTRAL)
    theirs = megatron_tensors(ours, MIXTRAL, "grouped")
    one, two = (f"decoder.layers.0.mlp.experts.linear_fc2.weight{expert}" for expert in (0, 1))
    theirs[one], theirs[two] = theirs[two], theirs[one]
    view = OurView(InMemory(theirs), megatron_keymap(MIXTRAL, theirs))
    assert not torch.equal(view.read("layers.0.moe.experts.down"), ours["layers.0.moe.experts.down"])


def test_missing_and_unexpected_tensors_are_all_listed():
    theirs = megatron_tensors(our_tensors(MIXTRAL), MIXTRAL)
    del theirs["decoder.layers.mlp.router.weight"]
    theirs["decoder.layers.self_attention.linear_qkv.bias"] = torch.zeros(2, 32)
    with pytest.raises(CheckpointError) as error:
        check_tensors(InMemory(theirs), megatron_keymap(MIXTRAL, theirs), "it")
    assert "'decoder.layers.mlp.router.weight' [2, 3, 8] is missing" in str(error.value)
    assert "'decoder.layers.self_attention.linear_qkv.bias' [2, 32] is unexpected" in str(error.value)


def test_states_and_layers_for_several_tokens_are_left_out():
    theirs = megatron_tensors(our_tensors(MIXTRAL), MIXTRAL, "grouped")
    theirs["decoder.layers.0.mlp.experts.linear_fc1._extra_state1"] = torch.zeros(0)
    theirs["mtp.layers.0.eh_proj.weight"] = torch.zeros(1)
    assert len(check_tensors(InMemory(theirs), megatron_keymap(MIXTRAL, theirs), "it")) == 2


def test_names_and_shapes_of_a_tied_model_with_qk_norm():
    keymap = megatron_keymap(MIXTRAL | {"family": "qwen3_moe", "qk_norm": True, "tie_embeddings": True})
    assert keymap.theirs == {
        "embedding.word_embeddings.weight": (10, 8),
        "decoder.layers.self_attention.linear_proj.weight": (2, 8, 16),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (2, 8),
        "decoder.layers.self_attention.linear_qkv.weight": (2, 32, 8),
        "decoder.layers.self_attention.q_layernorm.weight": (2, 4),
        "decoder.layers.self_attention.k_layernorm.weight": (2, 4),
        "decoder.layers.pre_mlp_layernorm.weight": (2, 8),
        "decoder.layers.mlp.router.weight": (2, 3, 8),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": (2, 3, 12, 8),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": (2, 3, 8, 6),
        "decoder.final_layernorm.weight": (8,),
    }
    assert keymap.aliases == {"output_layer.weight": "embedding.word_embeddings.weight"}


def test_names_and_shapes_of_a_model_with_latent_attention_and_a_dense_first_layer():
    attention = {
        "input_layernorm.weight": (8,),
        "self_attention.linear_proj.weight": (8, 16),
        "self_attention.linear_q_down_proj.weight": (5, 8),
        "self_attention.linear_q_up_proj.layer_norm_weight": (5,),
        "self_attention.linear_q_up_proj.weight": (24, 5),
        "self_attention.linear_kv_down_proj.weight": (5, 8),
        "self_attention.linear_kv_up_proj.layer_norm_weight": (3,),
        "self_attention.linear_kv_up_proj.weight": (32, 3),
    }
    dense = {
        "mlp.linear_fc1.layer_norm_weight": (8,),
        "mlp.linear_fc1.weight": (20, 8),
        "mlp.linear_fc2.weight": (8, 10),
    }
    routed = {
        "pre_mlp_layernorm.weight": (8,),
        "mlp.router.weight": (3, 8),
        "mlp.router.expert_bias": (3,),
        "mlp.experts.experts.linear_fc1.weight": (3, 12, 8),
        "mlp.experts.experts.linear_fc2.weight": (3, 8, 6),
        "mlp.shared_experts.linear_fc1.weight": (12, 8),
        "mlp.shared_experts.linear_fc2.weight": (8, 6),
    }
    assert megatron_keymap(DEEPSEEK).theirs == {
        "embedding.word_embeddings.weight": (10, 8),
        **{f"decoder.layers.0.{name}": shape for name, shape in (attention | dense).items()},
        **{f"decoder.layers.1.{name}": shape for name, shape in (attention | routed).items()},
        "decoder.final_layernorm.weight": (8,),
        "output_layer.weight": (10, 8),
    }


def test_layout_of_a_model_saved_in_single_tensors_halves_every_gated_layer():
    names = megatron_keymap(DEEPSEEK).theirs
    assert MegatronLayout.of(names).experts == "stacked"
    single = [name.replace("experts.experts.linear_fc2", "experts.experts.0.linear_fc2") for name in names]
    assert MegatronLayout.of(single).experts == "single"
    ours = our_tensors(DEEPSEEK)
    view = TheirView(InMemory(ours), megatron_keymap(DEEPSEEK, single))
    for module, fused in (
        ("0.mlp", ours["layers.0.mlp.gate_up"]),
        ("1.mlp.shared_experts", ours["layers.1.moe.shared_experts.gate_up"]),
        ("1.mlp.experts.experts.2", ours["layers.1.moe.experts.gate_up"][2]),
    ):
        halves = [view.read(f"decoder.layers.{module}.linear_fc1.weight_{half}") for half in "wv"]
        assert torch.equal(torch.cat(halves), fused)
