"""What activation checkpointing repeats on several ranks."""

import pytest

from tests.distributed.parity_jobs import Layout, Spec
from tests.distributed.step_jobs import ops_of_a_step
from tests.helpers.pool import RankPool

SPEC = Spec(seed=6)
NUM_LAYERS = SPEC.sizes.num_layers
EXCHANGES_FORWARD = 4  # counts, rows and weights out; results back
EXCHANGES_BACKWARD = 3  # of all but the counts


@pytest.mark.parametrize(("mode", "repeated"), [("none", 0), ("selective", 0), ("full", EXCHANGES_FORWARD)])
def test_the_choice_is_made_once_and_only_full_repeats_the_exchange(ranks: RankPool, mode: str, repeated: int):
    for ops in ranks.run(ops_of_a_step, 2, SPEC, Layout(1, 2, checkpointing=mode)):
        assert ops["aten.topk.default"] == NUM_LAYERS
        exchanges = EXCHANGES_FORWARD + EXCHANGES_BACKWARD + repeated
        assert ops["_c10d_functional.all_to_all_single.default"] == NUM_LAYERS * exchanges


@pytest.mark.parametrize(("mode", "repeated"), [("none", 0), ("selective", 0), ("full", 1)])
def test_only_full_gathers_and_scatters_the_sequence_again(ranks: RankPool, mode: str, repeated: int):
    # Attention gathers and scatters once in each direction, the embedding scatters, and the head gathers.
    expected = NUM_LAYERS * (2 + repeated) + 2
    for ops in ranks.run(ops_of_a_step, 2, SPEC, Layout(1, 1, tp=2, checkpointing=mode)):
        assert ops["_c10d_functional.all_gather_into_tensor.default"] == expected
        assert ops["_c10d_functional.reduce_scatter_tensor.default"] == expected


def test_selective_repeats_no_matrix_product_but_repeats_norms(ranks: RankPool):
    none, selective, full = (
        ranks.run(ops_of_a_step, 2, SPEC, Layout(1, 2, checkpointing=mode))[0] for mode in ("none", "selective", "full")
    )
    attention = [name for name in none if "scaled_dot_product" in name and "backward" not in name]
    assert attention
    for name in ("aten.mm.default", "aten._grouped_mm.default", *attention):
        assert 0 < none[name] == selective[name] < full[name], name
    assert 0 < none["aten.rsqrt.default"] < selective["aten.rsqrt.default"]
