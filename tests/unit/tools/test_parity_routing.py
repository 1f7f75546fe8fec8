"""Choices of experts by global sample and position: recorded, replayed, and compared where they would differ."""

from pathlib import Path
from typing import cast

import pytest
import torch

from moe_framework.model.block import Block
from moe_framework.model.decoder import Decoder
from moe_framework.parallel.activation_checkpointing import apply_activation_checkpointing
from moe_framework.train.step import forward
from tests.unit.model.builders import SMALL, plain_decoder, random_batch
from tools.parity.routing import Place, Recorder, Replayer

LENGTHS = [[12], [5, 4], [7]]
SEQ_LENGTH = 12
FIRST_SAMPLE = 30
NUM_TOKENS = sum(map(sum, LENGTHS))
SHAPE = (1, SMALL.num_layers, len(LENGTHS), SEQ_LENGTH)


def recorded(path: Path) -> None:
    model = plain_decoder()
    recorder = Recorder(model, SHAPE, SMALL.top_k)
    run(model, recorder)
    recorder.save(path)


def batch():
    made = random_batch(1, LENGTHS, seq_length=SEQ_LENGTH)
    return type(made)(**{**vars(made), "sample_ids": tuple(range(FIRST_SAMPLE, FIRST_SAMPLE + len(LENGTHS)))})


def run(model: Decoder, watch: Recorder | Replayer, *, steps: int = 1) -> torch.Tensor:
    rows = batch()
    for step in range(1, steps + 1):
        watch.begin(step, [rows], FIRST_SAMPLE)
        out = forward(model, rows)
        out.loss.backward()
    return out.tokens_per_expert_LE


def test_the_same_weights_choose_the_same(tmp_path: Path):
    recorded(tmp_path / "routing.pt")
    model = plain_decoder()
    replayer = Replayer(model, 0, tmp_path / "routing.pt")
    run(model, replayer)
    assert (replayer.found.choices, replayer.found.differing) == (SMALL.num_layers * NUM_TOKENS, 0)


def test_other_weights_get_the_recorded_choices_and_the_gap_is_seen(tmp_path: Path):
    path = tmp_path / "routing.pt"
    recorded(path)
    plain, model = plain_decoder(), plain_decoder()
    expected = run(plain, Recorder(plain, SHAPE, SMALL.top_k))
    with torch.no_grad():
        cast(Block, model.layers[1]).moe.router.weight.neg_()
    replayer = Replayer(model, 0, path)
    assert torch.equal(run(model, replayer), expected)
    assert 0 < replayer.found.differing <= NUM_TOKENS
    assert replayer.found.largest_gap > 0.1
    place = replayer.found.where
    assert place is not None
    assert (place.step, place.layer) == (1, 1)
    assert place.position < sum(LENGTHS[place.sample])


def test_a_near_tie_has_a_small_gap_at_its_place(tmp_path: Path):
    path = tmp_path / "routing.pt"
    recorded(path)
    content = torch.load(path)
    gaps = content["gaps"].clone()
    gaps[gaps.isinf()] = 0.0
    content["gaps"].fill_(1e-7)
    # The recorded choice of one token is another than its weights give.
    content["experts"][0, 0, 1, 3, 1] = next(
        expert for expert in range(SMALL.num_experts) if expert not in content["experts"][0, 0, 1, 3].tolist()
    )
    torch.save(content, path)
    model = plain_decoder()
    replayer = Replayer(model, 0, path)
    run(model, replayer)
    assert replayer.found.differing >= 1
    model = plain_decoder()
    only_first = Replayer(model, 0, path)
    only_first.begin(1, [batch()], FIRST_SAMPLE)
    with torch.no_grad():
        forward(model, batch())
    # Its own scores were not tied at all, so the gap that counts is theirs, not the recorded one.
    assert only_first.found.largest_gap > 1e-4
    assert only_first.found.where is not None


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputation_counts_nothing_twice_and_gets_the_same_choices(tmp_path: Path, mode: str):
    recorded(tmp_path / "routing.pt")
    model = plain_decoder()
    apply_activation_checkpointing(model, mode)
    replayer = Replayer(model, 0, tmp_path / "routing.pt")
    run(model, replayer)
    assert (replayer.found.choices, replayer.found.differing) == (SMALL.num_layers * NUM_TOKENS, 0)


def test_differences_of_ranks_add_up_and_keep_the_largest(tmp_path: Path):
    from tools.parity.routing import Differences

    total = Differences()
    total.add(Differences(10, 1, 0.1, Place(1, 0, 0, 0)))
    total.add(Differences(10, 2, 0.3, Place(1, 1, 2, 3)))
    total.add(Differences(10))
    assert total == Differences(30, 3, 0.3, Place(1, 1, 2, 3))
