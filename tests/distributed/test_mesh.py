import pytest
import torch.distributed as dist

from moe_framework.distributed.mesh import build_mesh
from tests.helpers.pool import RankPool


def groups_of(degrees: dict[str, int]) -> dict:
    mesh = build_mesh("cpu", **degrees)
    return {
        "axes": dict(zip(mesh.root.mesh_dim_names or (), mesh.root.shape, strict=True)),
        "ep": dist.get_process_group_ranks(mesh.ep_group),
        "expert": dist.get_process_group_ranks(mesh.expert.get_group()),
        "tokens": dist.get_process_group_ranks(mesh.tokens.get_group()),
        "world": dist.get_process_group_ranks(mesh.world_group),
        "tp": dist.get_process_group_ranks(mesh.tp_group),
        "dense": dist.get_process_group_ranks(mesh.dense.get_group()),
        "data": dist.get_process_group_ranks(mesh.data_group),
        "data_rank": mesh.data_rank,
        "num_data_ranks": mesh.num_data_ranks,
    }


def test_one_rank_has_every_axis(ranks: RankPool):
    (groups,) = ranks.run(groups_of, 1, {"dp": 1, "ep": 1})
    assert groups["axes"] == {"dp_replicate": 1, "dp_shard": 1, "ep": 1, "tp": 1}
    assert groups["num_data_ranks"] == 1
    assert groups["ep"] == groups["expert"] == groups["dense"] == groups["data"] == [0]


def test_ep_ranks_are_neighbours_and_every_rank_has_its_own_data(ranks: RankPool):
    for rank, groups in enumerate(ranks.run(groups_of, 4, {"dp": 2, "ep": 2})):
        assert groups["ep"] == [[0, 1], [0, 1], [2, 3], [2, 3]][rank]
        assert groups["expert"] == [[0, 2], [1, 3], [0, 2], [1, 3]][rank]
        assert groups["dense"] == groups["data"] == [0, 1, 2, 3]
        assert (groups["data_rank"], groups["num_data_ranks"]) == (rank, 4)


@pytest.mark.parametrize(("dp", "ep"), [(4, 1), (1, 4)])
def test_an_axis_of_one_is_an_axis_like_any_other(ranks: RankPool, dp: int, ep: int):
    everyone = [0, 1, 2, 3]
    for rank, groups in enumerate(ranks.run(groups_of, 4, {"dp": dp, "ep": ep})):
        assert groups["ep"] == (everyone if ep == 4 else [rank])
        assert groups["expert"] == (everyone if dp == 4 else [rank])
        assert groups["data"] == everyone


def test_tp_ranks_share_their_data_and_vary_fastest(ranks: RankPool):
    for rank, groups in enumerate(ranks.run(groups_of, 4, {"dp": 1, "ep": 2, "tp": 2})):
        assert groups["axes"]["tp"] == 2
        assert groups["data"] == groups["dense"] == groups["ep"] == [[0, 2], [1, 3]][rank % 2]
        assert groups["tp"] == groups["expert"] == [[0, 1], [2, 3]][rank // 2]
        assert groups["tokens"] == groups["world"] == [0, 1, 2, 3]
        assert (groups["data_rank"], groups["num_data_ranks"]) == (rank // 2, 2)


def test_ranks_that_share_an_experts_width_have_different_slices_of_it(ranks: RankPool):
    for rank, groups in enumerate(ranks.run(groups_of, 4, {"dp": 2, "ep": 1, "tp": 2, "expert_tp": 2})):
        assert groups["expert"] == groups["dense"] == [[0, 2], [1, 3]][rank % 2]
        assert groups["tokens"] == groups["world"] == [0, 1, 2, 3]


def test_replicas_have_their_own_data_and_their_own_shards(ranks: RankPool):
    for rank, groups in enumerate(ranks.run(groups_of, 4, {"dp": 4, "ep": 1, "dp_replicate": 2})):
        assert groups["axes"] == {"dp_replicate": 2, "dp_shard": 2, "ep": 1, "tp": 1}
        assert groups["dense"] == groups["expert"] == groups["tokens"] == [[0, 1], [2, 3]][rank // 2]
        assert groups["data"] == groups["world"] == [0, 1, 2, 3]
