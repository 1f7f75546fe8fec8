"""Sizes from Megatron's tensors and arguments."""

import pytest

from moe_framework.checkpoint.convert.keymap_megatron import megatron_keymap
from moe_framework.checkpoint.convert.megatron_sizes import megatron_args, our_sizes
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.convert.megatron_checkpoints import ARGS, DEEPSEEK, MIXTRAL, megatron_tensors, our_tensors


def shapes_of(sizes: dict) -> dict[str, tuple[int, ...]]:
    return megatron_keymap(sizes).theirs


@pytest.mark.parametrize(
    "sizes",
    [
        MIXTRAL,
        MIXTRAL | {"family": "qwen3_moe", "qk_norm": True, "tie_embeddings": True, "init_std": 0.01},
        MIXTRAL | {"num_kv_heads": 4, "num_layers": 1},
        MIXTRAL | {"padded_vocab_size": 128},
        DEEPSEEK,
    ],
)
def test_sizes_come_back_from_what_is_written(sizes):
    assert our_sizes(shapes_of(sizes), megatron_args(sizes), {}, "it") == sizes


@pytest.mark.parametrize("layout", ["stacked", "by_layer", "single", "grouped", "sequential"])
def test_sizes_are_found_in_every_layout(layout):
    tensors = megatron_tensors(our_tensors(MIXTRAL), MIXTRAL, layout)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert our_sizes(shapes, ARGS, {}, "it") == MIXTRAL


def test_what_the_caller_knows_fills_in_for_missing_arguments():
    given = {key: MIXTRAL[key] for key in ("num_heads", "top_k", "max_positions", "rope_theta", "norm_eps")}
    assert our_sizes(shapes_of(MIXTRAL), {}, given, "it") == MIXTRAL


@pytest.mark.parametrize(("key", "value"), [("top_k", 1), ("rope_theta", 5.0), ("norm_eps", 0.5), ("num_heads", 2)])
def test_what_the_caller_knows_may_not_contradict_the_arguments(key: str, value: float):
    with pytest.raises(CheckpointError, match=f"{key}={value} contradicts its arguments, which have {key}="):
        our_sizes(shapes_of(MIXTRAL), ARGS, {key: value}, "it")


def test_what_is_missing_is_listed_with_megatrons_names():
    with pytest.raises(CheckpointError, match=r"num_heads \(Megatron's num_attention_heads\), .*norm_eps .*Give"):
        our_sizes(shapes_of(MIXTRAL), {}, {}, "it")


def test_the_true_vocabulary_is_taken_from_the_caller_before_the_arguments():
    shapes = shapes_of(MIXTRAL | {"padded_vocab_size": 128})
    assert our_sizes(shapes, ARGS, {}, "it")["vocab_size"] == 128
    assert our_sizes(shapes, ARGS | {"vocab_size": 11}, {}, "it")["vocab_size"] == 11
    assert our_sizes(shapes, ARGS | {"vocab_size": 11}, {"vocab_size": 10}, "it")["vocab_size"] == 10
    with pytest.raises(CheckpointError, match="vocab_size=129, but the embedding has 128 rows"):
        our_sizes(shapes, ARGS, {"vocab_size": 129}, "it")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3}, "num_heads=3"),
        ({"num_attention_heads": 8}, "num_heads=8.*kv_channels=4"),
        ({"num_query_groups": 4}, "num_query_groups=4"),
        ({"num_attention_heads": 32}, "num_heads=32"),
        ({"num_attention_heads": "4"}, "num_heads='4' must be a number"),
        ({"swiglu": False}, "swiglu=False"),
        ({"normalization": "LayerNorm"}, "normalization='LayerNorm'"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type='learned_absolute'"),
        ({"rotary_interleaved": True}, "rotary_interleaved=True"),
        ({"moe_router_pre_softmax": True}, "moe_router_pre_softmax=True"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function='sigmoid'"),
    ],
)
def test_arguments_that_contradict_the_tensors_or_our_model_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        our_sizes(shapes_of(MIXTRAL), ARGS | changes, {}, "it")


def test_key_value_heads_that_do_not_divide_the_query_heads_are_refused():
    shapes = shapes_of(MIXTRAL) | {"decoder.layers.self_attention.linear_qkv.weight": (2, (4 + 2 * 3) * 4, 8)}
    with pytest.raises(CheckpointError, match="num_heads=4 does not fit"):
        our_sizes(shapes, {**ARGS, "group_query_attention": False}, {}, "it")


def test_given_sizes_that_contradict_the_tensors_are_refused():
    with pytest.raises(CheckpointError, match=r"num_layers=3 contradicts its tensors, which have num_layers=2"):
        our_sizes(shapes_of(MIXTRAL), ARGS, {"num_layers": 3}, "it")


@pytest.mark.parametrize("name", ["decoder.layers.mlp.router.weight", "decoder.final_layernorm.weight"])
def test_checkpoint_of_another_kind_of_model_is_refused(name):
    shapes = {**shapes_of(MIXTRAL)}
    del shapes[name]
    with pytest.raises(CheckpointError, match="no MoE GPTModel of Megatron-Core"):
        our_sizes(shapes, ARGS, {}, "it")


def test_scalars_in_place_of_weights_are_refused():
    with pytest.raises(CheckpointError):
        our_sizes(dict.fromkeys(shapes_of(MIXTRAL), ()), ARGS, {}, "it")
