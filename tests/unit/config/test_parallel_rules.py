"""Every rule between the parallel degrees, and with the model's sizes, is broken once."""

from itertools import product

import pytest

from moe_framework.config.validate import validate
from tests.unit.config.validation import check, violations_of

# Overrides of L0_sanity on two ranks, and the whole message that they must give, alone.
RULES = [
    # degrees
    (
        "parallel.ep=4",
        "parallel.ep·tp = 4·1 = 4 must divide the number of ranks, but the world has 2 ranks. "
        "Set parallel.ep=1 or 2, or start 4 ranks or a multiple of it.",
    ),
    (
        "parallel.dp=2",
        "parallel.dp·ep·tp = 2·2·1 = 4, but the world has 2 ranks. Set parallel.dp=1, or start 4 ranks.",
    ),
    ("parallel.dp=1 parallel.ep=4", "parallel.dp·ep·tp = 1·4·1 = 4, but the world has 2 ranks. Start 4 ranks."),
    ("model.num_experts=9", "parallel.ep=2 must divide model.num_experts=9. Use 1, 3 or 9."),
    (
        "parallel.dp_replicate=2",
        "parallel.dp_replicate=2 must divide parallel.dp=1 (auto, of 2 ranks). Use 1.",
    ),
    (
        "parallel.tp=2 parallel.ep=1 model.num_heads=1 model.num_kv_heads=1",
        "parallel.tp=2 must divide model.num_heads=1. Use 1.",
    ),
    (
        "parallel.tp=2 parallel.ep=1 data.seq_length=255",
        "data.seq_length=255 must be a multiple of parallel.tp=2, because the tp ranks share each row's positions. "
        "Use 254 or 256.",
    ),
    (
        "parallel.tp=2 parallel.ep=1 parallel.expert_tp=2 model.intermediate_size=63",
        "parallel.expert_tp=2 must divide model.intermediate_size=63. "
        "Set parallel.expert_tp=1, or model.intermediate_size=62 or 64.",
    ),
    (
        "parallel.tp=2 parallel.ep=1 parallel.expert_tp=2 experts.backend=grouped_mm model.intermediate_size=68",
        "model.intermediate_size=68 must be a multiple of 8 for experts.backend=grouped_mm in fp32, which needs "
        "strides of 16 bytes. Use 64 or 72, or experts.backend=loop.",
    ),
    (
        "precision.attention=quantized precision.mode=bf16",
        "precision.attention=quantized is not available in precision.mode=bf16. Use one of fp8_current, fp8_delayed, "
        "fp8_block, mxfp8_emulated, or precision.attention=bf16.",
    ),
    (
        "precision.attention=quantized precision.mode=mxfp8_emulated model.hidden_size=132 model.head_dim=32",
        "model.hidden_size=132 must be a multiple of 32 for precision.attention=quantized in mxfp8_emulated. "
        "Use 128 or 160, or precision.attention=bf16.",
    ),
    (
        "precision.attention=quantized precision.mode=fp8_current data.seq_length=250 hardware.target=h200 "
        "train.dry_run=true parallel.dp=1 train.micro_batch_size=2",
        "train.micro_batch_size · data.seq_length=500 must be a multiple of 16 for precision.attention=quantized in "
        "fp8_current. Use 496 or 512, or precision.attention=bf16.",
    ),
    (
        "parallel.tp=2 parallel.ep=1 precision.attention=quantized precision.mode=mxfp8_emulated",
        "precision.attention=quantized needs whole projections, so parallel.tp=1, not 2. Set precision.attention=bf16.",
    ),
    (
        "parallel.tp=2 parallel.ep=1 model.hidden_size=129 model.head_dim=32",
        "parallel.dp·tp = 1 (auto, of 2 ranks)·2 = 2 must divide model.hidden_size=129 and "
        "2·model.intermediate_size=256, because the experts' weights are split evenly. Use another parallel.tp than 2.",
    ),
    ("parallel.expert_tp=2", "parallel.expert_tp=2 must be 1 or parallel.tp=1. Use 1."),
]


@pytest.mark.parametrize(("overrides", "message"), RULES, ids=[rule[0] for rule in RULES])
def test_broken_rule_gives_its_message_alone(overrides: str, message: str):
    assert violations_of(overrides) == [message]


@pytest.mark.parametrize(("dp", "ep"), list(product([1, 2, 4], repeat=2)))
def test_auto_dp_fills_in_the_remainder(dp: int, ep: int):
    config = check(f"parallel.ep={ep} train.micro_batch_size=1", world_size=dp * ep)
    assert config.parallel.dp == dp
    assert validate(config, world_size=dp * ep) == config


def test_message_for_a_world_that_does_not_fit_the_degrees():
    assert violations_of("parallel.dp=2", world_size=8) == [
        "parallel.dp·ep·tp = 2·2·1 = 4, but the world has 8 ranks. Set parallel.dp=4, or start 4 ranks."
    ]


def test_one_rank_is_named_in_the_singular():
    (violation,) = violations_of("", world_size=1)
    assert "the world has 1 rank. Set parallel.ep=1, or start 2 ranks" in violation


def test_ep_that_divides_neither_the_ranks_nor_the_experts_breaks_both_rules():
    violations = violations_of("parallel.ep=3", world_size=2)
    assert [v.split(" = ")[0].split(" must")[0] for v in violations] == ["parallel.ep·tp", "parallel.ep=3"]
    assert violations[1] == "parallel.ep=3 must divide model.num_experts=8. Use 1, 2, 4 or 8."


@pytest.mark.parametrize(
    ("sizes", "width", "gate_up"),
    [("", 128, 256), ("model.hidden_size=96", 96, 256), ("model.intermediate_size=96", 128, 192)],
)
def test_dp_that_splits_the_experts_unevenly_is_refused(sizes: str, width: int, gate_up: int):
    overrides = f"parallel.ep=1 train.micro_batch_size=1 train.global_batch_size=3 {sizes}"
    message = (
        f"must divide model.hidden_size={width} and 2·model.intermediate_size={gate_up}, because the experts' weights "
        f"are split evenly. Use dp 2 or 4."
    )
    assert violations_of(overrides, world_size=3) == [f"parallel.dp=3 (auto, of 3 ranks) {message}"]
    assert violations_of(f"{overrides} parallel.dp=3", world_size=3) == [f"parallel.dp=3 {message}"]


def test_sizes_that_more_ranks_split_unevenly_are_refused():
    common = "train.micro_batch_size=1 parallel.ep=1"
    assert violations_of(f"{common} parallel.tp=2 parallel.dp=3 train.global_batch_size=3", world_size=6) == [
        "parallel.dp·tp = 3·2 = 6 must divide model.hidden_size=128 and 2·model.intermediate_size=256, because the "
        "experts' weights are split evenly. Use dp 2 or 4."
    ]
    replicas = "parallel.dp=6 parallel.dp_replicate=2 train.global_batch_size=6"
    assert violations_of(f"{common} {replicas}", world_size=6) == [
        "parallel.dp=6 must divide model.hidden_size=128 and 2·model.intermediate_size=256, because the experts' "
        "weights are split evenly within each of 2 replicas. Use dp 4 or 8."
    ]
    sliced = "parallel.tp=2 parallel.expert_tp=2 parallel.dp=4 train.global_batch_size=4 model.intermediate_size=36"
    assert violations_of(f"{common} {sliced} model.hidden_size=132 model.head_dim=32", world_size=8) == [
        "parallel.dp=4 must divide model.hidden_size=132 and model.intermediate_size/expert_tp=18, because the "
        "experts' weights are split evenly. Use dp 3 or 6."
    ]
    uneven = (
        "parallel.tp=2 parallel.dp=2 model.vocab_size=9 model.hidden_size=126 model.head_dim=32 parallel.dp_replicate=2"
    )
    assert check(f"{common} {uneven} train.global_batch_size=2", world_size=4)
    uneven = uneven.replace("dp=2", "dp=4")
    message = (
        "model.vocab_size=9 is no multiple of parallel.tp=2, so the embedding is split in its other dim too, and "
        "parallel.dp·ep = 4 (without replicas) must divide model.hidden_size=126. Use model.vocab_size=10, or other "
        "degrees."
    )
    overrides = f"{common} {uneven} model.num_experts=8 train.global_batch_size=8".replace("ep=1", "ep=2")
    assert message in violations_of(overrides, world_size=16)


def test_a_vocabulary_too_small_for_every_tp_rank_to_have_a_row_is_refused():
    overrides = "parallel.tp=4 parallel.ep=1"
    assert violations_of(f"{overrides} model.vocab_size=9", world_size=4) == [
        "model.vocab_size=9 leaves a tp rank without a row of the embedding, with parallel.tp=4 parts of 3. Use 12."
    ]
    for vocab_size in (8, 10, 11, 13):
        check(f"{overrides} model.vocab_size={vocab_size}", world_size=4)


def test_fewer_kv_heads_than_tp_ranks_are_allowed_where_each_serves_whole_ranks():
    overrides = "parallel.tp=4 parallel.ep=1 model.num_heads=12 model.hidden_size=96 parallel.dp=1"
    for kv_heads in (1, 2, 4, 12):
        assert check(f"{overrides} model.num_kv_heads={kv_heads}", world_size=4).parallel.tp == 4
    assert violations_of(f"{overrides} model.num_kv_heads=3", world_size=4) == [
        "parallel.tp=4 must divide model.num_kv_heads=3 or be a multiple of it, so that each rank's query heads have "
        "their key and value heads. Use 1, 3, 6 or 12."
    ]
