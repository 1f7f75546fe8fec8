from dataclasses import replace

import pytest

from moe_framework.planning.job import Job
from moe_framework.planning.memory import estimate_memory
from moe_framework.planning.moments import moments
from moe_framework.planning.parameters import all_parameters

# Mixtral-8x7B with four sequences of 4,096 on each rank.
MIXTRAL = Job(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_experts=8,
    top_k=2,
    vocab_size=32000,
    ep=2,
    micro_batch_size=4,
    seq_length=4096,
    compiled=True,
)
EXPERTS_OF_A_LAYER = 3 * 4096 * 14336 * 8


def total(**changes) -> int:
    return estimate_memory(replace(MIXTRAL, **changes)).total


def moment(name: str, **changes):
    return next(found for found in moments(replace(MIXTRAL, **changes)) if found.name == name)


def test_mixtral_has_its_published_size_and_a_checkpoint_twelve_bytes_a_parameter():
    found = estimate_memory(MIXTRAL)
    assert all_parameters(MIXTRAL) == 46_702_792_704
    assert found.checkpoint == 12 * 46_702_792_704
    assert found.staged * 2 == found.checkpoint
    assert found.masters * 3 == found.staged


@pytest.mark.parametrize(
    "change",
    [
        {"ep": 8},
        {"dp_shard": 2},
        {"micro_batch_size": 2},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
        {"tp": 2, "expert_tp": 2},
    ],
    ids=str,
)
def test_each_knob_lowers_the_estimate(change):
    assert total(**change) < total()


def test_replicas_share_nothing():
    assert total(dp_shard=2, dp_replicate=2) == total(dp_shard=2)


def test_recomputing_more_keeps_less():
    assert total(activation_checkpointing="full") < total(activation_checkpointing="selective") < total()


def test_accumulation_keeps_every_gradient_from_the_second_micro_batch_on():
    assert moment("the loss").gradients == 0
    every = 4 * estimate_memory(MIXTRAL).masters // 4
    assert moment("the loss", micro_steps=2).gradients == every
    assert moment("the update").gradients == every


def test_fsdp_gathers_a_layer_and_the_one_before_it_where_ranks_share_experts():
    alone, shared = (moment("backward of layer 3's experts", dp_shard=shards) for shards in (1, 2))
    assert shared.gathered - alone.gathered == 2 * 2 * EXPERTS_OF_A_LAYER // 2
    assert moment("backward of layer 0's experts", dp_shard=2).gathered == alone.gathered + EXPERTS_OF_A_LAYER


@pytest.mark.parametrize(
    ("change", "bytes_a_parameter"),
    [
        ({}, 2),
        ({"compute_bytes": 4}, 0),
        ({"dp_shard": 2}, 0),
        ({"dp_replicate": 2}, 0),
        ({"tp": 2}, 0),
        ({"tp": 2, "expert_tp": 2}, 1),
        ({"activation_checkpointing": "selective"}, 0),
        ({"quantized_layers": range(32), "copy_bytes": 1.0}, 1),
        ({"quantized_layers": range(32), "copy_bytes": 1.0, "dp_shard": 2}, 1),
        ({"quantized_layers": range(8, 24), "copy_bytes": 1.0, "dp_shard": 2}, 0.5),
        ({"quantized_layers": range(32), "copy_bytes": 1.0, "activation_checkpointing": "full"}, 0),
    ],
    ids=str,
)
def test_experts_keep_a_copy_for_backward_where_fsdp_does_not_gather_or_they_are_quantized(change, bytes_a_parameter):
    # In bf16 those that a rank holds alone; quantized ones in any layout. With expert_tp a rank has half of each.
    assert moment("the loss", **change).copies == bytes_a_parameter * 32 * EXPERTS_OF_A_LAYER // 2


def test_the_estimate_is_weights_and_moments_and_the_fullest_moment():
    found = estimate_memory(MIXTRAL)
    assert found.total == found.masters + found.moments + max(each.total for each in moments(MIXTRAL))
    assert found.peak.total == found.total - found.staged
