"""Damage and mischief: a clear error, the source as it was, and no half result."""

import errno
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_framework.checkpoint.convert import stream
from moe_framework.checkpoint.convert.convert import convert, verify
from moe_framework.checkpoint.convert.plan import Request, make_plan
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.convert.folders import FAMILY_SIZES, content, run, save_hf
from tests.unit.checkpoint.steps import rewrite_checksums

pytest.importorskip("transformers", reason="needs the hf extra")
from safetensors.torch import load_file, save_file

GATE_3 = "model.layers.2.block_sparse_moe.experts.3.w1.weight"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    save_hf(tmp_path / "source" / "hf", max_shard_size="60KB")
    return tmp_path / "source" / "hf"


def refused(source: Path, target: Path, to: str = "dcp", **options: Any) -> str:
    """Convert what cannot be converted; return the error."""
    before = content(source)
    with pytest.raises(CheckpointError) as caught:
        run(source, target, to, **options)
    assert content(source) == before
    assert not target.exists()
    assert not target.with_name(target.name + ".partial").exists()
    return str(caught.value)


def verify_again(source: Path, target: Path, to: str) -> None:
    plan = make_plan(Request(source, target, to))
    try:
        verify(plan, target, workers=2, on_bytes=lambda _: None)
    finally:
        plan.source.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_truncated_file_is_named(hf: Path, tmp_path: Path):
    path = sorted(hf.glob("*.safetensors"))[2]
    os.truncate(path, path.stat().st_size - 100)
    assert f"{path}: " in (text := refused(hf, tmp_path / "dcp"))
    assert "truncated or damaged" in text


def test_every_missing_file_of_the_index_is_named(hf: Path, tmp_path: Path):
    first, *_, last = sorted(hf.glob("*.safetensors"))
    first.unlink()
    last.unlink()
    text = refused(hf, tmp_path / "dcp")
    assert f"{first}: missing; it holds " in text
    assert f"{last}: missing; it holds " in text


def test_an_index_that_leads_out_of_the_folder_is_refused(hf: Path, tmp_path: Path):
    path = hf / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][GATE_3] = "../../secret.safetensors"
    path.write_text(json.dumps(index))
    assert "refers to files outside of the folder; refused" in refused(hf, tmp_path / "dcp")


def test_a_tensor_that_only_the_index_has_is_named(hf: Path, tmp_path: Path):
    path = hf / "model.safetensors.index.json"
    file = json.loads(path.read_text())["weight_map"][GATE_3]
    tensors = load_file(hf / file)
    del tensors[GATE_3]
    save_file(tensors, hf / file, {"format": "pt"})
    assert f"'{GATE_3}' is in model.safetensors.index.json, but not in its file" in refused(hf, tmp_path / "dcp")


def test_a_lost_expert_is_named(hf: Path, tmp_path: Path):
    path = hf / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"].pop(GATE_3)
    path.write_text(json.dumps(index))
    tensors = load_file(hf / file)
    del tensors[GATE_3]
    save_file(tensors, hf / file, {"format": "pt"})
    assert f"'{GATE_3}' [20, 48] is missing." in refused(hf, tmp_path / "dcp")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "llama", "model_type='llama' cannot be converted. Known are mixtral, qwen3_moe, deepseek_v3"),
        ("hidden_act", "gelu", "hidden_act='gelu' is not what the model computes"),
        ("sliding_window", 4096, "sliding_window=4096 is not what the model computes"),
        (
            "rope_parameters",
            {"rope_type": "yarn", "rope_theta": 1e6},
            "rope_type='yarn' is not what the model computes",
        ),
        ("rope_parameters", None, "rope_theta is missing"),
        ("num_local_experts", None, "num_local_experts is missing"),
        ("hidden_size", "48", "hidden_size='48' is not a number"),
    ],
)
def test_a_model_that_ours_cannot_compute_is_refused(hf: Path, tmp_path: Path, key: str, value: Any, message: str):
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, key: value}))
    assert message in refused(hf, tmp_path / "dcp")


def test_weights_that_are_normalised_only_by_default_elsewhere_are_refused(tmp_path: Path):
    # transformers takes a missing norm_topk_prob for false.
    save_hf(tmp_path / "qwen", FAMILY_SIZES["qwen3_moe"])
    path = tmp_path / "qwen" / "config.json"
    config = json.loads(path.read_text())
    del config["norm_topk_prob"]
    path.write_text(json.dumps(config))
    assert "norm_topk_prob=None is not what the model computes" in refused(tmp_path / "qwen", tmp_path / "dcp")


def test_a_flipped_byte_of_a_hugging_face_result_is_found(hf: Path, tmp_path: Path):
    run(hf, tmp_path / "dcp", "dcp")
    run(tmp_path / "dcp", tmp_path / "back", "hf")
    flip(sorted((tmp_path / "back").glob("*.safetensors"))[1], -3)
    with pytest.raises(CheckpointError, match=r"back: 'model\.[a-z0-9_.]*' does not come back: SHA-256"):
        verify_again(tmp_path / "dcp", tmp_path / "back", "hf")


def test_a_flipped_byte_of_a_step_is_found(hf: Path, tmp_path: Path):
    run(hf, tmp_path / "dcp", "dcp")
    flip(tmp_path / "dcp" / "__0_0.distcp", 3000)
    with pytest.raises(CheckpointError, match="SHA-256 differs from the manifest's: damaged"):
        verify_again(hf, tmp_path / "dcp", "dcp")
    refused(tmp_path / "dcp", tmp_path / "back", "hf")
    # With a manifest that was made to fit, the tensor's own checksum tells.
    rewrite_checksums(tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"does not come back|refused"):
        verify_again(hf, tmp_path / "dcp", "dcp")


def test_a_flipped_byte_of_the_source_is_found(hf: Path, tmp_path: Path):
    run(hf, tmp_path / "dcp", "dcp")
    flip(sorted(hf.glob("*.safetensors"))[1], -3)
    with pytest.raises(CheckpointError, match="does not come back"):
        verify_again(hf, tmp_path / "dcp", "dcp")


def test_two_exchanged_experts_are_found_by_name(hf: Path, tmp_path: Path):
    run(hf, tmp_path / "dcp", "dcp")
    run(tmp_path / "dcp", tmp_path / "back", "hf")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())["weight_map"]
    other = GATE_3.replace("experts.3", "experts.1")
    files = {name: load_file(tmp_path / "back" / index[name]) for name in (GATE_3, other)}
    values = {name: files[name][name].clone() for name in files}
    for name, value in ((GATE_3, values[other]), (other, values[GATE_3])):
        tensors = load_file(tmp_path / "back" / index[name])
        save_file(tensors | {name: value}, tmp_path / "back" / index[name], {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        verify_again(tmp_path / "dcp", tmp_path / "back", "hf")
    assert "'model.layers.2.moe.experts.gate_up' does not come back" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_damage_while_writing_keeps_the_target_from_appearing(hf: Path, tmp_path: Path):
    plan = make_plan(Request(hf, tmp_path / "dcp", "dcp"))

    def damage_and_verify(folder: Path) -> None:
        flip(folder / "__0_0.distcp", 3000)
        rewrite_checksums(folder)
        verify(plan, folder, workers=2, on_bytes=lambda _: None)

    with pytest.raises(CheckpointError):
        convert(plan, workers=2, on_bytes=lambda _: None, before_publishing=damage_and_verify)
    plan.source.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("to", ["dcp", "hf"])
def test_a_disk_that_fills_up_leaves_nothing(hf: Path, tmp_path: Path, to: str, monkeypatch):
    source = hf
    if to == "hf":
        run(hf, tmp_path / "step", "dcp")
        source = tmp_path / "step"
    real = stream.bytes_of
    calls = 0

    def full(tensor: torch.Tensor) -> memoryview:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(tensor)

    monkeypatch.setattr(stream, "bytes_of", full)
    text = refused(source, tmp_path / "target", to)
    assert text.startswith(f"{tmp_path / 'target'}: not written: No space left on device. Free some space")


class Crafted:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_metadata_that_would_run_code_is_refused(hf: Path, tmp_path: Path):
    run(hf, tmp_path / "dcp", "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Crafted(tmp_path / "ran")))
    rewrite_checksums(tmp_path / "dcp")
    assert "which may run code. Nothing was run" in refused(tmp_path / "dcp", tmp_path / "back", "hf")
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert "empty: not a checkpoint" in refused(tmp_path / "empty", tmp_path / "dcp")


def test_a_target_that_exists_is_kept(hf: Path, tmp_path: Path):
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match=r"exists\. Give another name"):
        run(hf, tmp_path / "dcp", "dcp")
    assert os.listdir(tmp_path / "dcp") == ["mine"]
