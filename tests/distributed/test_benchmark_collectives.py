"""The collectives benchmark: sizes, bytes by the formulas, and our dispatch."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from moe_framework.errors import ConfigError
from tests.helpers.pool import RankPool
from tools.benchmarks import collectives

OPTIONS = collectives.Options(
    device="cpu",
    num_ranks=2,
    megabytes=None,
    tokens=8,
    hidden_size=16,
    num_experts=4,
    top_k=2,
    warmup=1,
    repetitions=2,
    seed=0,
)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def measure() -> collectives.Report:
    return collectives.measure_collectives(world(), torch.device("cpu"), OPTIONS)


def test_every_exchange_has_a_time_and_a_rate_that_fit_each_other(ranks: RankPool):
    first, second = ranks.run(measure, 2)
    names = [result.name for result in first.results]
    assert names == [
        "all_to_all_single",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_reduce",
        collectives.DISPATCH_FORWARD,
        collectives.DISPATCH_BOTH,
    ]
    sent = {result.name: result.bytes_sent for result in first.results}
    assert [sent[name] for name in names[:4]] == [500_000, 1_000_000, 1_000_000, 1_000_000]
    for result, other in zip(first.results, second.results, strict=True):
        assert result.bytes_per_second == pytest.approx(result.bytes_sent / result.seconds.median)
        assert result.seconds == other.seconds


def dispatched_bytes() -> list[float]:
    return [result.bytes_sent for result in collectives.our_dispatch(world(), torch.device("cpu"), OPTIONS)]


def test_our_dispatch_sends_as_much_in_backward_as_in_forward_but_for_counts(ranks: RankPool):
    (forward, both), _ = ranks.run(dispatched_bytes, 2)
    counts = 2 * 8  # two experts' counts for the other rank, of 8 bytes
    assert both == 2 * (forward - counts) + counts


def bytes_of_plain_collectives() -> dict[str, float]:
    found = collectives.plain_collectives(1200, world(), torch.device("cpu"))
    for call, _ in found.values():
        call()
    return {name: sent for name, (_, sent) in found.items()}


def test_bytes_to_send_follow_the_number_of_ranks(ranks: RankPool):
    for sent in ranks.run(bytes_of_plain_collectives, 4):
        assert sent == {
            "all_to_all_single": 900,
            "all_gather_into_tensor": 3600,
            "reduce_scatter_tensor": 3600,
            "all_reduce": 1800,
        }


def test_one_rank_is_refused():
    with pytest.raises(ConfigError, match="--nproc=1: one rank exchanges nothing"):
        collectives.run(replace(OPTIONS, num_ranks=1))
