"""Steps of ours as source and target: any chunks, with the optimizer or without."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_framework.checkpoint.convert.dcp_source import DcpSource
from moe_framework.checkpoint.convert.families import our_shapes
from moe_framework.checkpoint.manifest import read_manifest
from moe_framework.checkpoint.store import CheckpointStore
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.convert.folders import SIZES, run

MODEL = {key: value for key, value in SIZES.items() if key != "family"}
STATE = {
    "config": {"model": MODEL},
    "position": {"step": 7, "consumed_samples": 28},
    "optimizer_step": 7,
    "layout": {"dp": 1},
}
RANK_STATE = {"rng": "abc"}


def run_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Weights and moments; the moments of an expert that never got a token are zero."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in our_shapes(SIZES).items():
        tensors[f"model.{name}"] = torch.randn(shape, generator=generator)
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.{moment}.{name}"] = torch.rand(shape, generator=generator)
            if "experts" in name:
                tensors[f"optimizer.{moment}.{name}"][2] = 0
    return tensors


def save_run(directory: Path, tensors: dict[str, Tensor]) -> Path:
    store = CheckpointStore(directory, keep=0, async_save=False, group=None)
    store.save(7, tensors, STATE, RANK_STATE)
    return directory / "step_00000007"


def load(step_dir: Path) -> dict[str, Tensor]:
    entries = read_manifest(step_dir).tensors
    tensors = {name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for name, entry in entries.items()}
    CheckpointStore(step_dir.parent, keep=0, async_save=False, group=None).load(step_dir, tensors)
    return tensors


def test_the_optimizer_goes_along_when_that_is_asked_for(tmp_path: Path):
    tensors = run_tensors()
    run(save_run(tmp_path / "run", tensors), tmp_path / "new", "dcp", optimizer=True)
    found = load(tmp_path / "new")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    manifest = read_manifest(tmp_path / "new")
    assert (manifest.step, manifest.state, manifest.rank_states) == (7, STATE, [RANK_STATE])


def test_weights_alone_keep_nothing_that_a_run_would_resume_from(tmp_path: Path):
    tensors = run_tensors()
    run(save_run(tmp_path / "run", tensors), tmp_path / "new", "dcp")
    assert load(tmp_path / "new").keys() == {name for name in tensors if name.startswith("model.")}
    manifest = read_manifest(tmp_path / "new")
    assert manifest.state.keys() == {"config", "layout", "conversion"}
    assert manifest.rank_states == []


def test_the_newest_step_of_a_run_is_taken(tmp_path: Path):
    save_run(tmp_path / "run", run_tensors())
    CheckpointStore(tmp_path / "run", keep=0, async_save=False, group=None).save(8, run_tensors(1), STATE)
    run(tmp_path / "run", tmp_path / "new", "dcp")
    assert torch.equal(load(tmp_path / "new")["model.norm.weight"], run_tensors(1)["model.norm.weight"])


def test_an_incomplete_optimizer_is_refused_with_every_name(tmp_path: Path):
    tensors = run_tensors()
    del tensors["optimizer.exp_avg.norm.weight"]
    tensors["optimizer.exp_avg_sq.norm.weight"] = torch.zeros(3)
    tensors["optimizer.exp_avg.other"] = torch.zeros(3)
    step_dir = save_run(tmp_path / "run", tensors)
    with pytest.raises(CheckpointError) as caught:
        run(step_dir, tmp_path / "new", "dcp", optimizer=True)
    text = str(caught.value)
    assert "'optimizer.exp_avg.norm.weight' is missing." in text
    assert "'optimizer.exp_avg.other' is unexpected." in text
    assert "'optimizer.exp_avg_sq.norm.weight' is [3], its parameter [48]." in text
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("hf", {"optimizer": True}, "dcp to hf has no place for the optimizer's state"),
        ("dcp", {"optimizer": True, "dtype": torch.bfloat16}, "with --dtype or --vocab-size"),
        ("dcp", {"optimizer": True, "vocab_size": 9}, "with --dtype or --vocab-size"),
    ],
)
def test_an_optimizer_that_would_be_stale_is_refused(tmp_path: Path, to: str, options: dict, message: str):
    step_dir = save_run(tmp_path / "run", run_tensors())
    with pytest.raises(CheckpointError, match=message):
        run(step_dir, tmp_path / "new", to, **options)


def test_a_steps_vocabulary_is_not_cropped(tmp_path: Path):
    step_dir = save_run(tmp_path / "run", run_tensors())
    with pytest.raises(CheckpointError, match="--vocab-size=9: only the padding of another format's vocabulary"):
        run(step_dir, tmp_path / "new", "hf", vocab_size=9)


def test_an_optimizer_that_is_not_there_is_refused(tmp_path: Path):
    step_dir = save_run(tmp_path / "run", {k: v for k, v in run_tensors().items() if k.startswith("model.")})
    with pytest.raises(CheckpointError, match="has no optimizer state"):
        run(step_dir, tmp_path / "new", "dcp", optimizer=True)


def test_a_step_of_another_thing_is_refused(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=0, async_save=False, group=None)
    store.save(7, {"model.x": torch.zeros(3)}, {"samples": 3})
    with pytest.raises(CheckpointError, match=r"manifest\.json does not say which model this is"):
        run(tmp_path / "step_00000007", tmp_path / "new", "hf")


def test_a_box_over_several_chunks_is_read(tmp_path: Path, monkeypatch):
    from moe_framework.checkpoint.convert import boxes, stream

    tensors = run_tensors()
    step_dir = save_run(tmp_path / "run", tensors)
    monkeypatch.setattr(stream, "parts", lambda info: boxes.parts(info, 1000))
    run(step_dir, tmp_path / "new", "dcp")
    name = "model.layers.1.moe.experts.gate_up"
    source = DcpSource(tmp_path / "new")
    assert source.location(name).startswith("32 chunks in ")
    box = (slice(1, 3), slice(3, 29), slice(5, 40))
    assert torch.equal(source.read(name, box), tensors[name][box])
    assert torch.equal(source.read(name), tensors[name])
    source.close()
