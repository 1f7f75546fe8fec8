"""Every layout computes what one process computes: losses, gradients, parameters and optimizer moments.

Tensor parallelism and model replicas are in `test_parity_tp.py`.
"""

from itertools import product

import pytest
import torch

from tests.distributed.parity_checks import (
    TOLERANCE,
    assert_compiled_equals_reference,
    assert_equal_to_reference,
    assert_one_expert_is_idle,
    reference_of,
)
from tests.distributed.parity_jobs import ROWS_WITH_AN_EMPTY_RANK, Layout, train
from tests.helpers.pool import RankPool

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)]
# Each mode of activation checkpointing and each backend meets several layouts; `slow` has the whole product.
SHORT_LIST = [
    Layout(1, 1, 1, "none", "loop"),
    Layout(1, 1, 2, "full", "grouped_mm"),
    Layout(2, 1, 1, "full", "grouped_mm"),
    Layout(2, 1, 2, "none", "loop"),
    Layout(1, 2, 1, "none", "grouped_mm"),
    Layout(1, 2, 2, "selective", "grouped_mm"),
    Layout(2, 2, 1, "selective", "grouped_mm"),
    Layout(2, 2, 2, "full", "loop"),
    Layout(1, 4, 1, "full", "grouped_mm"),
    Layout(1, 4, 2, "none", "loop"),
    Layout(4, 1, 1, "none", "grouped_mm"),
    pytest.param(Layout(4, 1, 2, "selective", "grouped_mm"), marks=pytest.mark.slow),
]
# Each layout in every way of training, with the two backends in turn.
FULL_PRODUCT = [
    Layout(dp, ep, accumulation, checkpointing, ("loop", "grouped_mm")[index % 2])
    for dp, ep in LAYOUTS
    for index, (accumulation, checkpointing) in enumerate(product((1, 2), ("none", "selective", "full")))
]


@pytest.mark.parametrize("layout", SHORT_LIST, ids=str)
def test_layout_equals_one_process(ranks: RankPool, layout: Layout):
    spec, expected = reference_of()
    traces = ranks.run(train, layout.world_size, spec, layout)
    assert_equal_to_reference(traces, expected, spec)
    assert_one_expert_is_idle(traces[0], spec)


def test_reference_does_what_the_comparison_is_meant_to_see():
    spec, expected = reference_of()
    assert_one_expert_is_idle(expected, spec)
    for scalars in expected.scalars:
        assert scalars["grad_norm"] > 0.5
        assert scalars["aux_loss"] > 1.0
        assert scalars["z_loss"] > 1.0
    moved = [name for name, value in expected.parameters.items() if torch.equal(value, expected.initial[name])]
    assert not moved, f"seed={spec.seed}: not trained: {moved}"


@pytest.mark.parametrize("layout", [Layout(4, 1), Layout(2, 2), Layout(1, 4)], ids=str)
def test_a_rank_with_padding_only_takes_part(ranks: RankPool, layout: Layout):
    spec, expected = reference_of(rows=ROWS_WITH_AN_EMPTY_RANK)
    assert_equal_to_reference(ranks.run(train, layout.world_size, spec, layout), expected, spec)


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2), Layout(2, 2, checkpointing="full")], ids=str)
def test_tied_head_equals_one_process(ranks: RankPool, layout: Layout):
    spec, expected = reference_of(tie_embeddings=True)
    assert_equal_to_reference(ranks.run(train, layout.world_size, spec, layout), expected, spec)


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2, checkpointing="full"), Layout(2, 2)], ids=str)
def test_global_batch_balancing_equals_one_process_without_accumulation(ranks: RankPool, layout: Layout):
    spec, expected = reference_of(aux_loss="global_batch")
    assert_equal_to_reference(ranks.run(train, layout.world_size, spec, layout), expected, spec)


def test_global_batch_balancing_equals_one_rank_at_the_same_accumulation(ranks: RankPool):
    spec, whole_batch = reference_of(aux_loss="global_batch")
    (expected,) = ranks.run(train, 1, spec, Layout(1, 1, 2))
    assert_equal_to_reference(ranks.run(train, 4, spec, Layout(2, 2, 2)), expected, spec)
    # It is another loss than the whole batch's: the counts are those of a micro-step.
    assert expected.scalars[0]["aux_loss"] != pytest.approx(whole_batch.scalars[0]["aux_loss"], rel=TOLERANCE)


def test_all_to_all_with_one_rank_equals_local(ranks: RankPool):
    spec, expected = reference_of()
    (trace,) = ranks.run(train, 1, spec, Layout(1, 1, dispatcher="all_to_all"))
    assert_equal_to_reference([trace], expected, spec)


def test_bf16_stays_near_fp32_with_fp32_masters_and_moments(ranks: RankPool):
    spec, expected = reference_of()
    trace = ranks.run(train, 2, spec, Layout(1, 2, mode="bf16"))[0]
    for tensors in (trace.gradients, trace.parameters, trace.exp_avg, trace.exp_avg_sq):
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    # bf16 keeps 8 bits, so a loss within 2^-8 of fp32's shows the same computation.
    assert trace.scalars[0]["loss"] == pytest.approx(expected.scalars[0]["loss"], rel=2**-8)
    assert trace.scalars[0]["loss"] != pytest.approx(expected.scalars[0]["loss"], rel=TOLERANCE / 100)


@pytest.mark.slow
def test_compiled_equals_one_process(ranks: RankPool):
    assert_compiled_equals_reference(ranks, Layout(1, 2, 2), *reference_of())


@pytest.mark.slow
@pytest.mark.parametrize("layout", FULL_PRODUCT, ids=str)
def test_every_combination_equals_one_process(ranks: RankPool, layout: Layout):
    spec, expected = reference_of()
    traces = ranks.run(train, layout.world_size, spec, layout)
    assert_equal_to_reference(traces, expected, spec)
    assert_one_expert_is_idle(traces[0], spec)
