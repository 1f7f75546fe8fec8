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


@pytest.mark.parametrize("layout", [Layout(2, 2), Layout(1, 4), Layout(4, 1)], ids=str)
def test_ranks_hold_every_number_once(ranks: RankPool, layout: Layout):
    held = [{n: math.prod(shape) for n, shape in shapes.items()} for shapes in ranks.run(shard_shapes, 4, SPEC, layout)]
    for name, parameter in plain_decoder(SMALL).named_parameters():
        assert sum(sizes[name] for sizes in held) == parameter.numel(), name


def test_the_router_computes_with_its_fp32_master_in_bf16_too(ranks: RankPool):
    assert all(ranks.run(router_weight_seen, 2, Spec(seed=5), Layout(1, 2, mode="bf16")))
