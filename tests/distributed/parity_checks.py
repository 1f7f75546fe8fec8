"""The comparison of a layout's trace with the reference, for the parity tests of several files.

The inputs are new in each run; a failure prints the seed, and PARITY_SEED=<seed> repeats it.

Every tensor may be 1e-5 away, relatively. On some inputs a gradient is a small difference of large terms, and after
three steps a change of each weight by one unit in the last place moves it by more: in 5 of 92 inputs of the model with
a tied head and norms of heads, by 3.3e-5 in the worst. There it may be as far as `tools/parity/tolerances.py` allows.
"""

import os
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from moe_framework.data.loader import collate
from tests.distributed.parity_jobs import IDLE_EXPERT, Layout, Spec, Trace, global_batch, train
from tests.distributed.parity_reference import reference
from tests.distributed.step_jobs import num_compiled_graphs
from tests.helpers.pool import RankPool
from tests.unit.model.builders import relative_difference
from tools.parity.tolerances import FP32 as TOLERANCE
from tools.parity.tolerances import NUM_MOVES, move_bound

# Nearer to a tie than this, rounding may choose another expert, and no implementation could be compared.
SMALLEST_MARGIN = 1e-5
KINDS = ("gradients", "parameters", "exp_avg", "exp_avg_sq")


@cache
def reference_of(**options) -> tuple[Spec, Trace]:
    """The reference on fresh inputs without near-ties; one per kind of model and session."""
    seed = int(os.environ.get("PARITY_SEED", random.SystemRandom().randrange(2**31)))
    while True:
        spec = Spec(seed=seed, **options)
        trace = reference(spec)
        if trace.margin > SMALLEST_MARGIN:
            return spec, trace
        seed += 1


def assert_equal_to_reference(traces: list[Trace], expected: Trace, spec: Spec) -> None:
    where = f"seed={spec.seed}"
    for name, value in expected.initial.items():
        assert torch.equal(traces[0].initial[name], value), f"{where}: {name}"
    for kind in KINDS:
        assert getattr(traces[0], kind).keys() == getattr(expected, kind).keys()
        far = {name: value for name, value in distances(traces[0], expected, kind).items() if not value <= TOLERANCE}
        far = {name: value for name, value in far.items() if not value <= rounding_bound(spec, kind, name)}
        assert not far, f"{where}: {kind} differ: {far}"
    for trace in traces:
        assert not trace.differing_replicas, f"{where}: {trace.differing_replicas}"
        assert trace.scalars == traces[0].scalars, where
        for counts, wanted_counts in zip(trace.tokens_per_expert, expected.tokens_per_expert, strict=True):
            assert torch.equal(counts, wanted_counts), where
    for step, wanted_scalars in enumerate(expected.scalars):
        assert traces[0].scalars[step] == pytest.approx(wanted_scalars, rel=TOLERANCE), f"{where}, step {step}"


def distances(trace: Trace, expected: Trace, kind: str) -> dict[str, float]:
    """Return the relative difference of each tensor of a kind."""
    return {name: relative_difference(getattr(trace, kind)[name], x) for name, x in getattr(expected, kind).items()}


@cache
def rounding_bound(spec: Spec, kind: str, name: str) -> float:
    """Return how far a tensor may be because its inputs make it ill-conditioned."""
    return move_bound(max(moved[kind][name] for moved in _moved_by_rounding(spec)))


@cache
def _moved_by_rounding(spec: Spec) -> list[dict[str, dict[str, float]]]:
    expected = reference(spec)
    moved = [reference(spec, rounding=seed) for seed in range(NUM_MOVES)]
    return [{kind: distances(trace, expected, kind) for kind in KINDS} for trace in moved]


def assert_compiled_equals_reference(ranks: RankPool, layout: Layout, spec: Spec, expected: Trace) -> None:
    """Check compiled blocks, loss and optimizer, with and without activation checkpointing."""
    for checkpointing in ("none", "full"):
        compiled = replace(layout, checkpointing=checkpointing, compiled=True)
        traces = ranks.run(train, layout.world_size, spec, compiled, timeout_s=280)
        assert_equal_to_reference(traces, expected, spec)
        # Nothing else in these processes compiles.
        assert all(count > 0 for count in ranks.run(num_compiled_graphs, layout.world_size))


def assert_one_expert_is_idle(trace: Trace, spec: Spec) -> None:
    """Check that one expert gets no token, and that experts without tokens, and only those, have no gradient."""
    for counts in trace.tokens_per_expert:
        assert counts[:, IDLE_EXPERT].eq(0).all()
    batch = collate(global_batch(spec, 0), tuple(range(len(spec.rows))))
    # The last token of a document has no target, and none after it that would attend to it: its gradient is zero.
    num_without_target = batch.num_tokens - batch.num_targets
    for layer, counts in enumerate(trace.tokens_per_expert[0]):
        for kind in ("gate_up", "down"):
            gradient = trace.gradients[f"layers.{layer}.moe.experts.{kind}"]
            assert torch.count_nonzero(gradient[counts == 0]) == 0
            assert (gradient.flatten(1).norm(dim=1)[counts > num_without_target] > 0).all()
