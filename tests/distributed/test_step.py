import pytest
import torch

from moe_framework.data.loader import collate
from tests.distributed.parity_jobs import ROWS_WITH_AN_EMPTY_RANK, Layout, Spec, global_batch, idle_one_expert
from tests.distributed.step_jobs import (
    all_reduces_of_gradients,
    counts_when_one_loader_failed,
    heldout_loss,
    step_with_a_bad_weight,
)
from tests.helpers.pool import RankPool
from tests.unit.model.builders import plain_decoder

SPEC = Spec(seed=3)


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2), Layout(1, 1, tp=2)], ids=str)
def test_a_non_finite_step_changes_nothing_on_any_rank(ranks: RankPool, layout: Layout):
    for applied, moved, loss in ranks.run(step_with_a_bad_weight, 2, SPEC, layout, 1):
        assert not applied
        assert not moved
        assert loss != loss


def test_counts_are_those_of_the_whole_step(ranks: RankPool):
    batch = collate(global_batch(SPEC, 0), tuple(range(8)))
    assert ranks.run(counts_when_one_loader_failed, 2, SPEC, None) == [(batch.num_targets, batch.num_tokens)] * 2


def test_ranks_with_the_same_rows_count_them_once(ranks: RankPool):
    batch = collate(global_batch(SPEC, 0), tuple(range(8)))
    expected = [(batch.num_targets, batch.num_tokens)] * 4
    assert ranks.run(counts_when_one_loader_failed, 4, SPEC, None, tp=2) == expected
    errors = ranks.run_expecting_error(counts_when_one_loader_failed, 4, SPEC, 3, tp=2)
    assert errors == [("DataError", "data.path=/x.fa: ended early.")] * 4


def test_one_ranks_data_ending_early_stops_every_rank_with_its_error(ranks: RankPool):
    errors = ranks.run_expecting_error(counts_when_one_loader_failed, 4, SPEC, 2)
    assert errors == [("DataError", "data.path=/x.fa: ended early.")] * 4


@pytest.mark.parametrize("rows", [SPEC.rows, ROWS_WITH_AN_EMPTY_RANK], ids=["padded", "empty_rank"])
@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(1, 4), Layout(1, 2, tp=2)], ids=str)
def test_heldout_loss_is_the_mean_over_all_targets(ranks: RankPool, layout: Layout, rows: tuple):
    spec = Spec(seed=4, rows=rows)
    model = plain_decoder(spec.sizes, seed=spec.seed)
    idle_one_expert(model)
    batch = collate(global_batch(spec, 0), tuple(range(len(rows))))
    with torch.no_grad():
        out = model(
            batch.tokens,
            batch.positions,
            batch.targets,
            document_ids_BS=batch.document_ids,
            valid_index_T=batch.valid_index,
        )
    results = ranks.run(heldout_loss, layout.world_size, spec, layout)
    assert results == [(pytest.approx(out.loss.item() / batch.num_targets, rel=1e-5), False)] * layout.world_size


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"dp": 4}], ids=["one_shard", "two_shards"])
def test_replicas_add_their_gradients_once_a_step_however_many_micro_batches_it_has(ranks: RankPool, degrees: dict):
    layouts = [Layout(ep=1, dp_replicate=2, accumulation=accumulation, **degrees) for accumulation in (1, 2)]
    once, accumulated = (ranks.run(all_reduces_of_gradients, one.world_size, SPEC, one) for one in layouts)
    # The experts, the router and the rest of each layer, the embedding, the head.
    assert accumulated == once == [3 * SPEC.sizes.num_layers + 2] * layouts[0].world_size
