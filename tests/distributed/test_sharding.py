import math

import pytest

from tests.distributed.parity_jobs import Layout, Spec
from tests.distributed.step_jobs import router_weight_seen, shard_shapes
from tests.helpers.pool import RankPool
from tests.unit.model.builders import SMALL, plain_decoder

SPEC = Spec(seed=5)


@pytest.mark.parametrize("layout", [Layout(2, 2), Layout(1, 4), Layout(4, 1)], ids=str)
def test_whole_experts_go_to_ep_ranks_and_slices_of_them_to_dp_ranks(ranks: RankPool, layout: Layout):
    for shapes in ranks.run(shard_shapes, 4, SPEC, layout):
        experts = SMALL.num_experts // layout.ep
        width, hidden = SMALL.intermediate_size, SMALL.hidden_size
        assert shapes["layers.0.moe.experts.gate_up"] == (experts, 2 * width // layout.dp, hidden)
        assert shapes["layers.0.moe.experts.down"] == (experts, hidden // layout.dp, width)
        assert shapes["layers.1.moe.router.weight"] == (SMALL.num_experts // 4, hidden)


def test_tp_ranks_hold_their_heads_and_vocabulary_and_share_the_rest(ranks: RankPool):
    hidden, width, head_dim = SMALL.hidden_size, SMALL.intermediate_size, SMALL.resolved_head_dim
    for rank, shapes in enumerate(ranks.run(shard_shapes, 4, SPEC, Layout(1, 1, tp=4))):
        assert shapes["embed.weight"] == shapes["lm_head.weight"] == (4 if rank < 3 else 1, hidden)
        assert shapes["layers.0.attention.q_proj.weight"] == (head_dim, hidden)
        assert shapes["layers.0.attention.o_proj.weight"] == (hidden, head_dim)
        # Two heads for four ranks: shared for storage, gathered whole.
        assert shapes["layers.0.attention.k_proj.weight"] == (2 * head_dim // 4, hidden)
        assert shapes["layers.0.attention_norm.weight"] == (hidden // 4,)
        assert shapes["layers.0.moe.router.weight"] == (SMALL.num_experts // 4, hidden)
        assert shapes["layers.0.moe.experts.gate_up"] == (SMALL.num_experts, 2 * width // 4, hidden)
    for shapes in ranks.run(shard_shapes, 4, SPEC, Layout(2, 1, backend="loop", tp=2, expert_tp=2)):
        assert shapes["layers.0.moe.experts.gate_up"] == (SMALL.num_experts, 2, width // 4, hidden)
        assert shapes["layers.0.moe.experts.down"] == (SMALL.num_experts, hidden // 2, width // 2)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 2),
        Layout(1, 4),
        Layout(4, 1),
        Layout(1, 1, tp=4),
        Layout(2, 1, tp=2),
        Layout(1, 2, backend="loop", tp=2, expert_tp=2),
    ],
    ids=str,
)
def test_ranks_hold_every_number_once(ranks: RankPool, layout: Layout):
    held = [{n: math.prod(shape) for n, shape in shapes.items()} for shapes in ranks.run(shard_shapes, 4, SPEC, layout)]
    for name, parameter in plain_decoder(SMALL).named_parameters():
        assert sum(sizes[name] for sizes in held) == parameter.numel(), name


def test_the_router_computes_with_its_fp32_master_in_bf16_too(ranks: RankPool):
    assert all(ranks.run(router_weight_seen, 2, Spec(seed=5), Layout(1, 2, mode="bf16")))
