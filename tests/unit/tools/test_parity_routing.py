"""Choices of experts by global sample and position: recorded, replayed, and compared where they would differ."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from moe_framework.data.loader import Batch
from moe_framework.model.block import Block
from moe_framework.model.decoder import Decoder
from moe_framework.moe.layer import TokenLayout
from moe_framework.parallel.activation_checkpointing import apply_activation_checkpointing
from moe_framework.train.step import forward
from tests.unit.model.builders import SMALL, plain_decoder, random_batch
from tools.parity.routing import Differences, Place, Recorder, Replayer

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


def batch() -> Batch:
    sample_ids = tuple(range(FIRST_SAMPLE, FIRST_SAMPLE + len(LENGTHS)))
    return replace(random_batch(1, LENGTHS, seq_length=SEQ_LENGTH), sample_ids=sample_ids)


def run(model: Decoder, watch: Recorder | Replayer) -> torch.Tensor:
    rows = batch()
    watch.begin(1, [rows], FIRST_SAMPLE)
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


def test_a_near_tie_counts_with_the_larger_gap_of_both_sides(tmp_path: Path):
    path = tmp_path / "routing.pt"
    recorded(path)
    content = torch.load(path)
    sample, position = 1, 3
    chosen = content["experts"][0, 0, sample, position]
    chosen[1] = next(expert for expert in range(SMALL.num_experts) if expert not in chosen.tolist())
    # The reference was not sure; this side's scores are far apart, so the choice is none of rounding.
    content["gaps"][0, 0, sample, position] = 1e-7
    torch.save(content, path)
    model = plain_decoder()
    replayer = Replayer(model, 0, path)
    replayer.begin(1, [batch()], FIRST_SAMPLE)
    with torch.no_grad():
        forward(model, batch())
    assert replayer.found.largest_gap > 1e-3
    first = Place(1, 0, sample, position)
    assert replayer.found.where is not None
    assert first <= replayer.found.where


def test_each_tp_rank_finds_its_own_positions(tmp_path: Path):
    recorded(tmp_path / "routing.pt")
    model = plain_decoder()
    replayer = Replayer(model, 1, tmp_path / "routing.pt")
    half = SEQ_LENGTH // 2
    rows = batch()
    replayer.begin(1, [rows], FIRST_SAMPLE)
    replayer._next_micro_batch()
    place: list[torch.Tensor] = []
    # The second half of rows of 12: a token of row 0 at position 6, and one of row 2 at position 9.
    layout = TokenLayout.of(torch.Size((3, half)), torch.tensor([0, 2 * half + 3]), torch.device("cpu"))
    replayer._locate(place, model, (torch.zeros(3, half, 1), layout))
    assert [part.tolist() for part in place] == [[0, 2], [6, 9]]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputation_counts_nothing_twice_and_gets_the_same_choices(tmp_path: Path, mode: str):
    recorded(tmp_path / "routing.pt")
    model = plain_decoder()
    apply_activation_checkpointing(model, mode)
    replayer = Replayer(model, 0, tmp_path / "routing.pt")
    run(model, replayer)
    assert (replayer.found.choices, replayer.found.differing) == (SMALL.num_layers * NUM_TOKENS, 0)


def test_differences_of_ranks_add_up_and_keep_the_largest():
    total = Differences()
    total.add(Differences(10, 1, 0.1, Place(1, 0, 0, 0)))
    total.add(Differences(10, 2, 0.3, Place(1, 1, 2, 3)))
    total.add(Differences(10))
    assert total == Differences(30, 3, 0.3, Place(1, 1, 2, 3))
