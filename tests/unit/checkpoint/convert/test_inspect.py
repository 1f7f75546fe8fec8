import math
from pathlib import Path

import pytest
import torch

from moe_framework.checkpoint.convert.formats import open_checkpoint
from moe_framework.checkpoint.convert.inspect import (
    Difference,
    differences,
    sample_of,
    statistics_of,
    table_of,
    under_our_names,
)
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.convert.folders import SIZES, MemorySource, our_tensors, run, save_hf


@pytest.fixture
def ours() -> dict[str, torch.Tensor]:
    return our_tensors(SIZES)


def test_statistics_are_those_of_the_whole_tensor(ours):
    ours["norm.weight"][3] = math.inf
    found = statistics_of(MemorySource(ours, SIZES), list(ours), workers=2)
    value = ours["layers.1.moe.experts.down"].double()
    numbers = found["layers.1.moe.experts.down"]
    assert numbers.norm == pytest.approx(float(value.norm()), rel=1e-12)
    assert (numbers.least, numbers.greatest) == (float(value.min()), float(value.max()))
    assert numbers.total / numbers.count == pytest.approx(float(value.mean()), abs=1e-12)
    assert numbers.nonfinite == 0
    assert found["norm.weight"].nonfinite == 1


def test_equal_checkpoints_do_not_differ_also_where_they_have_nan(ours):
    ours["norm.weight"][3] = math.nan
    other = {name: tensor.clone() for name, tensor in ours.items()}
    assert differences(MemorySource(ours, SIZES), MemorySource(other, SIZES), workers=2) == {}


def test_differences_are_measured_and_named(ours):
    other = {name: tensor.clone() for name, tensor in ours.items()}
    other["norm.weight"][3] += 0.5
    other["lm_head.weight"][0, 0] = math.nan
    other["embed.weight"] = torch.zeros(3)
    del other["layers.0.moe_norm.weight"]
    other["new"] = torch.zeros(3)
    found = differences(MemorySource(ours, SIZES), MemorySource(other, SIZES), workers=2)
    assert found.keys() == {"norm.weight", "lm_head.weight", "embed.weight", "layers.0.moe_norm.weight", "new"}
    norm, head = found["norm.weight"], found["lm_head.weight"]
    assert isinstance(norm, Difference)
    assert isinstance(head, Difference)
    assert (norm.count, norm.largest) == (1, pytest.approx(0.5, rel=1e-6))
    assert norm.relative == pytest.approx(0.5 / float(ours["norm.weight"].double().norm()), rel=1e-6)
    assert math.isnan(head.largest)
    assert found["embed.weight"] == "[101, 48] in the first, [3] in the second"
    assert found["layers.0.moe_norm.weight"] == "only in the first"
    assert found["new"] == "only in the second"


def test_checkpoints_of_two_formats_are_compared_under_our_names(tmp_path: Path):
    pytest.importorskip("transformers", reason="needs the hf extra")
    save_hf(tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "dcp", "dcp")
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    opened = [open_checkpoint(tmp_path / name) for name in ("hf", "dcp", "megatron")]
    assert [kind for _, kind in opened] == ["hf", "dcp", "megatron"]
    views = [under_our_names(source, kind) for source, kind in opened]
    assert differences(views[0], views[1], workers=2) == {}
    assert differences(views[0], views[2], workers=2) == {}
    for source, _ in opened:
        table = table_of(source, statistics_of(source, list(source.tensors()), workers=2))
        assert all(row["stored"] and row["norm"] > 0 for row in table)
        source.close()


def test_the_first_elements_are_shown(ours):
    source = MemorySource({"a": torch.arange(12.0).reshape(2, 6), "b": torch.tensor(3.0), "c": torch.zeros(0)}, {})
    assert sample_of(source, "a", 4) == [0.0, 1.0, 2.0, 3.0]
    assert sample_of(source, "b") == [3.0]
    assert sample_of(source, "c") == []
    with pytest.raises(CheckpointError, match="--tensor=d: there is no such tensor"):
        sample_of(source, "d")
