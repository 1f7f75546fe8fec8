"""Tensor parallelism and model replicas compute what one process computes, whatever they are combined with.

The model has two key and value heads, fewer than the four tp ranks, and an odd vocabulary.
"""

from itertools import product
from typing import Any

import pytest

from tests.distributed.parity_checks import (
    assert_compiled_equals_reference,
    assert_equal_to_reference,
    assert_one_expert_is_idle,
    reference_of,
)
from tests.distributed.parity_jobs import ROWS_WITH_AN_EMPTY_RANK, Layout, train
from tests.helpers.pool import RankPool

# Each of accumulation, activation checkpointing and backend meets each kind of layout; `slow` has the whole product.
SHORT_LIST = [
    Layout(1, 1, 2, "full", tp=2),
    Layout(1, 2, 1, "none", "loop", tp=2),
    Layout(2, 1, 2, "selective", tp=2),
    Layout(1, 1, 1, "full", tp=4),
    Layout(1, 2, 2, "selective", tp=2, expert_tp=2),
    Layout(2, 1, 1, "full", "loop", tp=2, expert_tp=2),
    Layout(1, 1, 2, "none", "loop", tp=4, expert_tp=4),
    Layout(4, 1, 2, "full", dp_replicate=2),
    Layout(2, 2, 1, "none", dp_replicate=2),
    Layout(2, 1, 1, "selective", tp=2, dp_replicate=2),
    Layout(2, 1, 2, "none", tp=2, dp_replicate=2, expert_tp=2),
]
DEGREES: list[dict[str, Any]] = [
    {"dp": 1, "ep": 1, "tp": 2},
    {"dp": 1, "ep": 2, "tp": 2},
    {"dp": 2, "ep": 1, "tp": 2},
    {"dp": 1, "ep": 1, "tp": 4},
    {"dp": 2, "ep": 1, "dp_replicate": 2},
    {"dp": 4, "ep": 1, "dp_replicate": 2},
    {"dp": 4, "ep": 1, "dp_replicate": 4},
    {"dp": 2, "ep": 2, "dp_replicate": 2},
    {"dp": 2, "ep": 1, "tp": 2, "dp_replicate": 2},
]
SPREADS = [(degrees, expert_tp) for degrees in DEGREES for expert_tp in sorted({1, degrees.get("tp", 1)})]
# Half of the product, every other way of training for one layout and the rest for the next.
FULL_PRODUCT = [
    Layout(accumulation=accumulation, checkpointing=checkpointing, backend="loop", expert_tp=expert_tp, **degrees)
    for index, (degrees, expert_tp) in enumerate(SPREADS)
    for accumulation, checkpointing in list(product((1, 2), ("none", "selective", "full")))[index % 2 :: 2]
]
EIGHT_RANKS = [
    Layout(2, 2, 1, "none", tp=2),
    Layout(2, 2, 2, "full", tp=2, expert_tp=2),
    Layout(2, 2, 1, "selective", tp=2, dp_replicate=2),
    Layout(2, 1, 1, "none", "loop", tp=4),
]


@pytest.mark.parametrize(
    "layout",
    [*SHORT_LIST[::2], *(pytest.param(layout, marks=pytest.mark.slow) for layout in SHORT_LIST[1::2])],
    ids=str,
)
def test_layout_equals_one_process(ranks: RankPool, layout: Layout):
    spec, expected = reference_of()
    traces = ranks.run(train, layout.world_size, spec, layout)
    assert_equal_to_reference(traces, expected, spec)
    assert_one_expert_is_idle(traces[0], spec)


@pytest.mark.parametrize("layout", [Layout(2, 1, tp=2), Layout(1, 1, tp=4, expert_tp=4, backend="loop")], ids=str)
def test_a_rank_with_padding_only_takes_part(ranks: RankPool, layout: Layout):
    spec, expected = reference_of(rows=((3,), (), (), ()) if layout.tp == 4 else ROWS_WITH_AN_EMPTY_RANK)
    assert_equal_to_reference(ranks.run(train, layout.world_size, spec, layout), expected, spec)


@pytest.mark.parametrize("layout", [Layout(2, 1, tp=2, checkpointing="full"), Layout(1, 1, tp=4)], ids=str)
def test_tied_head_and_norms_of_heads_equal_one_process(ranks: RankPool, layout: Layout):
    spec, expected = reference_of(tie_embeddings=True, changes=(("qk_norm", True),))
    assert_equal_to_reference(ranks.run(train, layout.world_size, spec, layout), expected, spec)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(1, 2, tp=2, checkpointing="full"), marks=pytest.mark.slow),
        Layout(4, 1, dp_replicate=2),
    ],
    ids=str,
)
def test_global_batch_balancing_equals_one_process_without_accumulation(ranks: RankPool, layout: Layout):
    spec, expected = reference_of(aux_loss="global_batch")
    assert_equal_to_reference(ranks.run(train, layout.world_size, spec, layout), expected, spec)


@pytest.mark.slow
def test_compiled_equals_one_process(ranks: RankPool):
    assert_compiled_equals_reference(ranks, Layout(1, 1, 2, tp=2), *reference_of(changes=(("qk_norm", True),)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", FULL_PRODUCT, ids=str)
def test_every_combination_equals_one_process(ranks: RankPool, layout: Layout):
    spec, expected = reference_of()
    traces = ranks.run(train, layout.world_size, spec, layout)
    assert_equal_to_reference(traces, expected, spec)
    assert_one_expert_is_idle(traces[0], spec)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EIGHT_RANKS, ids=str)
def test_eight_ranks_equal_one_process(ranks: RankPool, layout: Layout):
    # 17 rows over two tp ranks, and then over four: neither split is even, nor is one the other's refinement.
    spec, expected = reference_of(changes=(("vocab_size", 17),))
    assert_equal_to_reference(ranks.run(train, 8, spec, layout, timeout_s=280), expected, spec)
