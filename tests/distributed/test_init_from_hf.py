"""Training starts from a Hugging Face folder at any layout, and goes back to one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_framework.checkpoint.convert.dcp_source import DcpSource
from moe_framework.config.schema import ModelConfig
from tests.distributed import train_jobs as jobs
from tests.distributed.init_from_hf_jobs import Started, start_counting
from tests.helpers.pool import RankPool
from tests.helpers.tiny_runs import arguments, losses
from tests.unit.checkpoint.convert.folders import SIZES, run, save_hf
from tests.unit.model.builders import plain_decoder, relative_difference

pytest.importorskip("transformers", reason="needs the hf extra")
from transformers import AutoModelForCausalLM

MODEL = {key: value for key, value in SIZES.items() if key != "family"}
LAYOUTS = {"dp1_ep4": (1, 4), "dp2_ep2": (2, 2), "dp4_ep1": (4, 1)}
SOME_SLOW = [pytest.param(name, marks=() if name == "dp2_ep2" else pytest.mark.slow) for name in LAYOUTS]
TOKENS = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("source") / "hf"
    return folder, save_hf(folder, max_shard_size="60KB")


def start_arguments(folder: Path, source: Path, dp: int, ep: int, *changes: str, **options: Any) -> list[str]:
    sizes = (f"model.{key}={str(value).lower()}" for key, value in MODEL.items())
    own = (*sizes, f"parallel.dp={dp}", f"parallel.ep={ep}", f"checkpoint.init_from={source}", *changes)
    return arguments(folder, *own, **options)


def our_parameters(model: Any) -> dict[str, Tensor]:
    """The parameters of transformers' model by our names, written out here by hand."""
    state = model.state_dict()
    found = {
        "embed.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "lm_head.weight": state["lm_head.weight"],
    }
    for layer in range(SIZES["num_layers"]):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        found[f"{ours}.attention_norm.weight"] = state[f"{theirs}.input_layernorm.weight"]
        found[f"{ours}.moe_norm.weight"] = state[f"{theirs}.post_attention_layernorm.weight"]
        for kind in "qkvo":
            found[f"{ours}.attention.{kind}_proj.weight"] = state[f"{theirs}.self_attn.{kind}_proj.weight"]
        found[f"{ours}.moe.router.weight"] = state[f"{theirs}.mlp.gate.weight"]
        found[f"{ours}.moe.experts.gate_up"] = state[f"{theirs}.mlp.experts.gate_up_proj"]
        found[f"{ours}.moe.experts.down"] = state[f"{theirs}.mlp.experts.down_proj"]
    return found


def their_logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def our_logits(step_dir: Path) -> Tensor:
    """The logits of a plain decoder with a step's weights."""
    decoder = plain_decoder(ModelConfig(**MODEL), seed=0)
    source = DcpSource(step_dir)
    decoder.load_state_dict({name: source.read(f"model.{name}") for name in decoder.state_dict()})
    source.close()
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        logits = decoder(TOKENS, positions).logits_BSV
    assert logits is not None
    return logits


@pytest.mark.parametrize("layout", SOME_SLOW)
def test_every_layout_starts_with_the_folders_weights_and_reads_each_element_once(
    ranks: RankPool, hf, tmp_path: Path, layout: str
):
    folder, model = hf
    started: list[Started] = ranks.run(start_counting, 4, start_arguments(tmp_path, folder, *LAYOUTS[layout]))
    expected = our_parameters(model)
    for one in started:
        assert one.step == 0
        assert one.parameters.keys() == expected.keys()
        assert all(torch.equal(one.parameters[name], tensor) for name, tensor in expected.items())
    assert f"initial weights from {folder}" in started[0].text
    read: dict[str, int] = {}
    for one in started:
        for name, count in one.elements_read.items():
            read[name] = read.get(name, 0) + count
    total = sum(tensor.numel() for tensor in expected.values())
    assert sum(read.values()) == total
    assert max(sum(one.elements_read.values()) for one in started) < total / 2


@pytest.mark.parametrize("source", ["hf", "bf16 step"])
@pytest.mark.parametrize("expert_tp", [1, 2])
def test_tensor_parallel_layouts_start_with_the_folders_weights(
    ranks: RankPool, hf, tmp_path: Path, expert_tp: int, source: str
):
    folder, model = hf
    dtype = torch.float32 if source == "hf" else torch.bfloat16
    if source != "hf":
        run(folder, tmp_path / "dcp", "dcp", dtype=dtype)
        folder = tmp_path / "dcp"
    degrees = ("parallel.tp=2", f"parallel.expert_tp={expert_tp}")
    (tmp_path / "run").mkdir()
    started = ranks.run(start_counting, 4, start_arguments(tmp_path / "run", folder, 1, 2, *degrees))
    for one in started:
        for name, expected in our_parameters(model).items():
            assert torch.equal(one.parameters[name].reshape(expected.shape), expected.to(dtype).float()), name


def test_a_damaged_step_of_another_dtype_is_refused_by_every_rank(ranks: RankPool, hf, tmp_path: Path):
    run(hf[0], tmp_path / "dcp", "dcp", dtype=torch.bfloat16)
    file = max((tmp_path / "dcp").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    ended = ranks.run(jobs.command, 2, start_arguments(tmp_path, tmp_path / "dcp", 1, 2))
    assert [one.code for one in ended] == [2, 2]
    assert file.name in ended[0].text


def test_bf16_weights_are_exact_in_the_masters(ranks: RankPool, hf, tmp_path: Path):
    run(hf[0], tmp_path / "dcp", "dcp", dtype=torch.bfloat16)
    run(tmp_path / "dcp", tmp_path / "hf", "hf")
    expected = {name: tensor.bfloat16().float() for name, tensor in our_parameters(hf[1]).items()}
    for source in ("dcp", "hf"):
        (tmp_path / f"from_{source}").mkdir()
        (started,) = ranks.run(start_counting, 1, start_arguments(tmp_path / f"from_{source}", tmp_path / source, 1, 1))
        assert all(torch.equal(started.parameters[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("layout", SOME_SLOW)
def test_trained_weights_go_back_to_transformers_with_our_logits(ranks: RankPool, hf, tmp_path: Path, layout: str):
    run(hf[0], tmp_path / "dcp", "dcp")
    line = start_arguments(tmp_path, tmp_path / "dcp", *LAYOUTS[layout], "optim.warmup_steps=1", max_steps=2)
    ended = [seen.ended for seen in ranks.run(jobs.watch, 4, line)]
    assert all(one is not None and one.code == 0 for one in ended), ended
    assert len(losses(tmp_path / "run")) == 2
    run(tmp_path / "run" / "checkpoints", tmp_path / "back", "hf", like=hf[0])
    before, after = their_logits(hf[0]), their_logits(tmp_path / "back")
    assert relative_difference(our_logits(tmp_path / "dcp"), before) < TOLERANCE
    assert relative_difference(our_logits(tmp_path / "run" / "checkpoints" / "step_00000002"), after) < TOLERANCE
    assert relative_difference(after, before) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.num_kv_heads=3", "model.num_kv_heads=3: {folder} has 2"),
        (
            "model.rope_theta=10000.0",
            "model.rope_theta=10000.0: {folder} has 1000000.0. Set model.rope_theta=1000000.0.",
        ),
        ("model.num_layers=3", "model.num_layers=3: {folder} has 4. Set model.num_layers=4."),
    ],
)
def test_another_model_is_refused_by_every_rank(ranks: RankPool, hf, tmp_path: Path, change: str, message: str):
    ended = ranks.run(jobs.command, 2, start_arguments(tmp_path, hf[0], 1, 2, change))
    assert [one.code for one in ended] == [2, 2]
    assert message.format(folder=hf[0]) in ended[0].text


def test_a_converted_step_starts_a_run_and_does_not_resume_one(ranks: RankPool, hf, tmp_path: Path):
    run(hf[0], tmp_path / "dcp", "dcp")
    line = start_arguments(tmp_path, hf[0], 1, 2, "checkpoint.init_from=null", f"checkpoint.resume={tmp_path / 'dcp'}")
    ended = ranks.run(jobs.command, 2, line)
    assert [one.code for one in ended] == [2, 2]
    remedy = f"Start a new one with checkpoint.init_from={tmp_path / 'dcp'}."
    assert f"dcp: has weights only, so that no run can go on from it. {remedy}" in ended[0].text


def test_a_damaged_folder_is_refused_by_every_rank(ranks: RankPool, tmp_path: Path):
    save_hf(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    ended = ranks.run(jobs.command, 2, start_arguments(tmp_path, tmp_path / "hf", 1, 2))
    assert [one.code for one in ended] == [2, 2]
    assert "truncated or damaged" in ended[0].text
