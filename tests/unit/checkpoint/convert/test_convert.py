"""Whole conversions of small models: what goes in comes out, file by file, and transformers reads it."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_framework.checkpoint.convert.convert import describe, write_report
from moe_framework.checkpoint.convert.dcp_source import DcpSource
from moe_framework.checkpoint.convert.formats import open_checkpoint
from moe_framework.checkpoint.convert.plan import Request, make_plan
from moe_framework.checkpoint.manifest import read_manifest
from moe_framework.checkpoint.store import CheckpointStore
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.convert.folders import FAMILY_SIZES, SIZES, content, run, save_fused, save_hf

pytest.importorskip("transformers", reason="needs the hf extra")
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

TOKENS = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> tuple[Path, Any]:
    """A Mixtral of four layers, saved by transformers, with a tokenizer's files; and the model."""
    folder = tmp_path_factory.mktemp("source") / "hf"
    model = save_hf(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    return folder, model


def logits_of(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def complaints_of(folder: Path) -> dict[str, Any]:
    """Missing, unexpected and mismatched keys that transformers finds."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return {kind: names for kind, names in loaded[1].items() if names}


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_round_trip_is_equal_file_by_file(hf, tmp_path: Path):
    run(hf[0], tmp_path / "dcp", "dcp")
    run(tmp_path / "dcp", tmp_path / "back", "hf")
    assert content(tmp_path / "back") == content(hf[0])


def test_round_trip_of_many_files_is_equal_file_by_file(hf, tmp_path: Path):
    hf[1].save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    run(tmp_path / "hf", tmp_path / "dcp", "dcp")
    run(tmp_path / "dcp", tmp_path / "back", "hf")
    assert content(tmp_path / "back") == content(tmp_path / "hf")


def test_fused_names_give_the_same_files(hf, tmp_path: Path):
    save_fused(tmp_path / "fused", hf[1])
    run(tmp_path / "fused", tmp_path / "dcp", "dcp")
    run(tmp_path / "dcp", tmp_path / "back", "hf")
    name = "model.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (hf[0] / name).read_bytes()


@pytest.mark.parametrize("family", FAMILY_SIZES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_family_comes_back_and_loads_without_a_word(family: str, tied: bool, tmp_path: Path, caplog):
    save_hf(tmp_path / "hf", FAMILY_SIZES[family] | {"tie_embeddings": tied})
    run(tmp_path / "hf", tmp_path / "dcp", "dcp")
    run(tmp_path / "dcp", tmp_path / "back", "hf")
    assert content(tmp_path / "back") == content(tmp_path / "hf")
    with caplog.at_level(logging.WARNING):
        assert complaints_of(tmp_path / "back") == {}
    assert caplog.records == []


def test_a_step_without_its_origin_gives_a_folder_that_transformers_loads(hf, tmp_path: Path):
    """As after training: the step says which model it is, and nothing else is known."""
    run(hf[0], tmp_path / "dcp", "dcp")
    source = DcpSource(tmp_path / "dcp")
    tensors = {name: source.read(name) for name in source.tensors()}
    state = {"config": {"model": {**read_manifest(tmp_path / "dcp").state["config"]["model"]}}}
    CheckpointStore(tmp_path / "run", keep=0, async_save=False, group=None).save(7, tensors, state)
    run(tmp_path / "run", tmp_path / "back", "hf")
    assert torch.equal(logits_of(tmp_path / "back"), logits_of(hf[0]))
    assert complaints_of(tmp_path / "back") == {}


def test_like_gives_the_tokenizer_and_the_configuration(hf, tmp_path: Path):
    run(hf[0], tmp_path / "dcp", "dcp")
    source = DcpSource(tmp_path / "dcp")
    tensors = {name: source.read(name) for name in source.tensors()}
    CheckpointStore(tmp_path / "run", keep=0, async_save=False, group=None).save(
        7, tensors, read_manifest(tmp_path / "dcp").state
    )
    run(tmp_path / "run", tmp_path / "back", "hf", like=hf[0])
    assert content(tmp_path / "back") == content(hf[0])


def test_like_of_another_model_is_refused(hf, tmp_path: Path):
    save_hf(tmp_path / "other", SIZES | {"num_heads": 4, "num_kv_heads": 4, "rope_theta": 1e4})
    run(hf[0], tmp_path / "dcp", "dcp")
    with pytest.raises(CheckpointError, match=r"num_heads is 6, in config.json 4.*rope_theta is 1000000.0"):
        run(tmp_path / "dcp", tmp_path / "back", "hf", like=tmp_path / "other")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("to", ["dcp", "hf"])
def test_dtype_is_that_of_plain_torch(hf, tmp_path: Path, to: str):
    middle = tmp_path / "dcp"
    run(hf[0], middle, "dcp", dtype=torch.bfloat16 if to == "dcp" else None)
    run(middle, tmp_path / "back", "hf", dtype=torch.bfloat16 if to == "hf" else None)
    expected = {name: tensor.bfloat16() for name, tensor in weights_of(hf[0]).items()}
    found = weights_of(tmp_path / "back")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_bias_that_chooses_experts_keeps_its_precision(tmp_path: Path):
    save_hf(tmp_path / "hf", FAMILY_SIZES["deepseek_v3"])
    run(tmp_path / "hf", tmp_path / "dcp", "dcp", dtype=torch.bfloat16)
    dtypes = {name: entry.dtype for name, entry in read_manifest(tmp_path / "dcp").tensors.items()}
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {
        f"model.layers.{layer}.moe.router.expert_bias" for layer in (1, 2, 3)
    }
    assert set(dtypes.values()) == {"float32", "bfloat16"}


def test_a_number_that_float16_cannot_hold_is_refused(hf, tmp_path: Path):
    model = hf[1]
    with torch.no_grad():
        old = model.lm_head.weight[3, 4].clone()
        model.lm_head.weight[3, 4] = 1e5
        model.save_pretrained(tmp_path / "hf")
        model.lm_head.weight[3, 4] = old
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' has numbers that float16 cannot hold"):
        run(tmp_path / "hf", tmp_path / "dcp", "dcp", dtype=torch.float16)


def test_max_shard_size_is_kept(hf, tmp_path: Path):
    run(hf[0], tmp_path / "dcp", "dcp", max_shard_bytes=30_000)
    run(tmp_path / "dcp", tmp_path / "back", "hf", max_shard_bytes=30_000)
    sizes = {
        path: sum(t.nbytes for t in load_file(path).values()) for path in (tmp_path / "back").glob("*.safetensors")
    }
    assert len(sizes) > 5
    assert max(sizes.values()) <= 30_000
    assert torch.equal(logits_of(tmp_path / "back"), logits_of(hf[0]))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 5


def test_a_step_loads_through_the_store_and_through_torch(hf, tmp_path: Path):
    run(hf[0], tmp_path / "dcp", "dcp")
    entries = read_manifest(tmp_path / "dcp").tensors
    one, two = ({name: torch.empty(entry.shape) for name, entry in entries.items()} for _ in range(2))
    CheckpointStore(tmp_path, keep=0, async_save=False, group=None).load(tmp_path / "dcp", one)
    torch.distributed.checkpoint.load(two, checkpoint_id=tmp_path / "dcp", no_dist=True)  # pyright: ignore
    assert all(torch.equal(one[name], two[name]) for name in entries)
    layer = hf[1].model.layers[2]
    assert torch.equal(one["model.layers.2.moe.experts.gate_up"], layer.mlp.experts.gate_up_proj)
    assert torch.equal(one["model.layers.2.attention.q_proj.weight"], layer.self_attn.q_proj.weight)


def test_a_padded_vocabulary_is_an_error_unless_its_size_is_given(hf, tmp_path: Path):
    tensors = weights_of(hf[0])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], torch.randn(27, SIZES["hidden_size"])])
    from safetensors.torch import save_file

    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text((hf[0] / "config.json").read_text())
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"'lm_head.weight' is \[128, 48\], but the model's sizes need \[101, 48\]"
    ):
        run(tmp_path / "hf", tmp_path / "dcp", "dcp")
    run(tmp_path / "hf", tmp_path / "dcp", "dcp", vocab_size=101)
    run(tmp_path / "dcp", tmp_path / "back", "hf")
    assert torch.equal(logits_of(tmp_path / "back"), logits_of(hf[0]))


@pytest.mark.parametrize("size", [0, 102])
def test_a_vocabulary_that_is_not_there_is_refused(hf, tmp_path: Path, size: int):
    with pytest.raises(CheckpointError, match=f"--vocab-size={size} must be from 1 to 101"):
        run(hf[0], tmp_path / "dcp", "dcp", vocab_size=size)


def test_the_report_names_every_tensor_with_its_sources_and_checksum(hf, tmp_path: Path):
    import hashlib

    plan = make_plan(Request(hf[0], tmp_path / "dcp", "dcp"))
    checksums = run(hf[0], tmp_path / "dcp", "dcp")
    write_report(tmp_path / "report.json", plan, checksums, None)
    report = json.loads((tmp_path / "report.json").read_text())
    entries = {entry["name"]: entry for entry in report["tensors"]}
    assert entries.keys() == read_manifest(tmp_path / "dcp").tensors.keys()
    down = entries["model.layers.1.moe.experts.down"]
    moe = "model.layers.1.block_sparse_moe.experts"
    assert down["sources"] == [f"{moe}.{expert}.w2.weight" for expert in range(4)]
    assert down["shape"] == [4, 48, 20]
    assert down["dtype"] == "float32"
    stacked = hf[1].model.layers[1].mlp.experts.down_proj.detach().numpy().tobytes()
    assert down["sha256"] == hashlib.sha256(stacked).hexdigest()
    plan.source.close()


def test_a_report_that_cannot_be_written_says_that_the_target_is_complete(hf, tmp_path: Path):
    plan = make_plan(Request(hf[0], tmp_path / "dcp", "dcp"))
    with pytest.raises(CheckpointError, match=r"report cannot be written .*dcp is complete"):
        write_report(tmp_path / "no" / "report.json", plan, {}, None)
    plan.source.close()


def test_an_expert_has_only_its_own_sources(hf, tmp_path: Path):
    run(hf[0], tmp_path / "dcp", "dcp")
    plan = make_plan(Request(tmp_path / "dcp", tmp_path / "x", "hf"))
    entries = {entry["name"]: entry["sources"] for entry in describe(plan, {})}
    plan.source.close()
    assert entries["model.layers.1.block_sparse_moe.experts.3.w1.weight"] == ["model.layers.1.moe.experts.gate_up"]


def test_bin_files_are_read_only_when_that_is_asked_for(hf, tmp_path: Path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_text((hf[0] / "config.json").read_text())
    torch.save(weights_of(hf[0]), tmp_path / "bin" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pickles \(pytorch_model\*\.bin\).*--allow-pickle"):
        run(tmp_path / "bin", tmp_path / "dcp", "dcp")
    run(tmp_path / "bin", tmp_path / "dcp", "dcp", allow_pickle=True)
    run(tmp_path / "dcp", tmp_path / "back", "hf")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (hf[0] / "model.safetensors").read_bytes()


class Crafted:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_bin_file_that_would_run_code_is_refused_even_then(hf, tmp_path: Path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_text((hf[0] / "config.json").read_text())
    torch.save({"a": Crafted(tmp_path / "ran")}, tmp_path / "bin" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"refused.*Nothing was run"):
        open_checkpoint(tmp_path / "bin", allow_pickle=True)
    assert not (tmp_path / "ran").exists()
