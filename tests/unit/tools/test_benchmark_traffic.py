"""The byte formulas agree with a count of every copy and every block that leaves a rank."""

import pytest
import torch

from tools.benchmarks.traffic import COUNT_BYTES, PROB_BYTES, Traffic, all_gather_traffic, all_to_all_traffic


def copies_between_ranks(ep: int, num_tokens: int, num_experts: int, top_k: int, seed: int) -> list[list[int]]:
    """Count copies one by one: entry [a][b] is what rank a has for rank b's experts."""
    generator = torch.Generator().manual_seed(seed)
    table = [[0] * ep for _ in range(ep)]
    for source in range(ep):
        for _ in range(num_tokens):
            for expert in torch.randperm(num_experts, generator=generator)[:top_k].tolist():
                table[source][expert // (num_experts // ep)] += 1
    return table


@pytest.mark.parametrize(("ep", "top_k"), [(2, 1), (2, 2), (4, 2), (4, 5)])
def test_all_to_all_bytes_are_those_of_the_copies_that_leave(ep: int, top_k: int):
    num_experts, row_bytes = 8, 48
    table = copies_between_ranks(ep, 11, num_experts, top_k, seed=ep)
    for rank in range(ep):
        forward = backward = 0
        for other in set(range(ep)) - {rank}:
            forward += num_experts // ep * COUNT_BYTES
            for _ in range(table[rank][other]):
                forward += row_bytes + PROB_BYTES
                backward += row_bytes
            for _ in range(table[other][rank]):
                forward += row_bytes
                backward += row_bytes + PROB_BYTES
        inbound = [table[source][rank] for source in range(ep)]
        found = all_to_all_traffic(table[rank], inbound, rank, num_experts=num_experts, row_bytes=row_bytes)
        assert found == Traffic(forward, backward)
        assert found.total == forward + backward


def test_all_to_all_sends_only_counts_when_every_copy_stays():
    found = all_to_all_traffic([0, 6], [0, 6], 1, num_experts=4, row_bytes=100)
    assert found == Traffic(forward=2 * COUNT_BYTES, backward=0)


def test_all_gather_bytes_are_those_of_each_tensors_blocks():
    tokens, probs, numbers = (torch.zeros(7, 16), torch.zeros(7, 3), torch.zeros(7, 3, dtype=torch.int64))
    found = all_gather_traffic(7, ep=4, top_k=3, row_bytes=16 * 4)
    # Three other ranks get what this rank gathers; as many blocks of results leave it, and backward mirrors both.
    assert found.forward == 3 * (tokens.nbytes + probs.nbytes + numbers.nbytes + tokens.nbytes)
    assert found.backward == 3 * (tokens.nbytes + tokens.nbytes + probs.nbytes)


def test_all_gather_costs_about_ep_over_top_k_times_the_all_to_all():
    ep, top_k, num_tokens, row_bytes = 4, 2, 1000, 8192
    share = num_tokens * top_k // ep
    uniform = all_to_all_traffic([share] * ep, [share] * ep, 0, num_experts=8, row_bytes=row_bytes)
    gathered = all_gather_traffic(num_tokens, ep=ep, top_k=top_k, row_bytes=row_bytes)
    assert gathered.total / uniform.total == pytest.approx(ep / top_k, rel=0.01)
