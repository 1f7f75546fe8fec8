from dataclasses import replace

from moe_framework.planning.job import Job
from moe_framework.planning.parameters import all_parameters, gathered_parameters, local_parameters

JOB = Job(
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    num_experts=8,
    top_k=2,
    vocab_size=13,
)
NORMS_AND_ROUTER = 2 * (2 * 32 + 8 * 32)


def test_projections_are_shared_out_over_tp_until_a_rank_has_one_key_head():
    def projections(tp: int) -> int:
        return gathered_parameters(replace(JOB, tp=tp), "block") - NORMS_AND_ROUTER

    queries_and_output, keys_and_values = 2 * 2 * 32 * 32, 2 * 2 * 8 * 32
    assert projections(1) == queries_and_output + keys_and_values
    assert projections(2) * 2 == projections(1)
    # Fewer key heads than ranks: keys and values are whole on each.
    assert projections(4) == queries_and_output // 4 + keys_and_values


def test_experts_are_shared_out_by_ep_and_their_width_by_expert_tp():
    whole = 2 * 8 * 3 * 32 * 48
    assert gathered_parameters(JOB, "experts") == whole
    assert gathered_parameters(replace(JOB, ep=4, tp=2), "experts") == whole // 4
    assert gathered_parameters(replace(JOB, ep=4, tp=2, expert_tp=2), "experts") == whole // 8
    assert local_parameters(replace(JOB, ep=4, tp=2, dp_shard=2), "experts") == whole // 16


def test_no_layout_changes_the_whole_model():
    layout = replace(JOB, ep=4, tp=4, dp_shard=2, dp_replicate=2, expert_tp=4)
    assert all_parameters(layout) == all_parameters(JOB) == local_parameters(JOB)
    table = 13 * 32
    assert all_parameters(JOB) - all_parameters(replace(JOB, tie_embeddings=True)) == table
