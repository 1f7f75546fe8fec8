"""The commands of tools/doctor.py: exit codes, text and JSON, on whatever machine runs the tests."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_framework.config.schema import Config, ExpertsConfig, ModelConfig, PrecisionConfig, TrainConfig
from moe_framework.moe.experts.choose import Choice
from moe_framework.precision.policy import PrecisionPolicy
from moe_framework.precision.recipes import RECIPES
from tools.diagnosis import backends, report, software

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/doctor.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_configuration_for_this_machine_has_no_violations(tmp_path: Path):
    done = doctor("--config-name", "L0_sanity", "--json", str(tmp_path / "found.json"), "device=cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Configuration L0_sanity, 2 ranks on this host" in done.stdout
    assert "no violations" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["configuration"]["violations"] == []
    assert found["configuration"]["ranks"] == 2
    assert found["experts"]["chosen"] == "grouped_mm"
    assert found["software"]["libraries"]["torch"] == torch.__version__
    assert {mode["mode"]: mode["available"] for mode in found["modes"]}["bf16"]
    assert found["fusion"]["active"] is False
    assert "precision.mode=fp32; only mxfp8 is fused" in found["fusion"]["obstacles"]
    kernels = {kernel["kernel"]: kernel["causal"] for kernel in found["attention"]}
    assert kernels["MATH"] is None
    assert kernels["CUDNN_ATTENTION"]


@without_gpu
def test_a_configuration_for_eight_gpus_is_refused_with_every_reason():
    done = doctor("--config-name", "L1_8x7B_ep", "train.global_batch_size=63")
    assert done.returncode == 1
    assert "Configuration L1_8x7B_ep, 8 ranks on this host" in done.stdout
    assert "3 violations:" in done.stdout
    for reason in (
        "train.global_batch_size=63 must be a multiple of",
        "precision.mode=auto8 needs compute capability 9.0",
        "precision.mode=auto8 needs a GPU for each of the 8 ranks, and this host has 0 GPUs",
    ):
        assert f"- {reason}" in done.stdout or f"- device=auto: {reason}" in done.stdout
    assert "it needs a GPU of compute capability 10.0 to 10.7 (Blackwell); there is no CUDA device" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim.lr=1"], "error: optim.lr=1 overrides nothing: --config-name is missing"),
        (["--config-name", "L0_sanity", "--ranks", "0"], "argument --ranks: '0' is no integer of at least 1"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--config-name", "L0_sanity", "optim.learnign_rate=1"], "unknown key. Did you mean optim.lr?"),
        (["--config-name", "L0_sane"], "Did you mean L0_sanity?"),
    ],
)
def test_a_command_that_cannot_be_understood_ends_with_2_before_torch_is_loaded(arguments: list[str], message: str):
    code = (
        "import sys; from tools.doctor import main\ntry: print(main(sys.argv[1:]))\nexcept SystemExit as e: print(e)\n"
    )
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["2", "False"]
    assert message in done.stderr


@pytest.mark.parametrize(
    ("config", "mode", "expected"),
    [
        (Config(), "bf16", "precision.mode=bf16; only mxfp8 is fused"),
        (Config(precision=PrecisionConfig(mode="auto8")), "fp8_current", "precision.mode=auto8 is fp8_current; only"),
        (Config(precision=PrecisionConfig(mode="mxfp8")), None, "precision.mode=mxfp8 is not available here; only"),
        (Config(experts=ExpertsConfig(backend="loop")), "mxfp8", "experts.backend=loop; only te"),
        (Config(model=ModelConfig(hidden_size=96)), "mxfp8", "model.hidden_size=96 is no multiple of 64"),
        (Config(train=TrainConfig(deterministic=True)), "mxfp8", "train.deterministic=true"),
    ],
)
def test_what_keeps_a_configuration_from_fused_experts_is_named(config: Config, mode: str | None, expected: str):
    found = backends.examine_fusion(config, mode, (9, 0), CPU)
    assert not found.active
    assert any(obstacle.startswith(expected) for obstacle in found.obstacles)
    assert any("this one has 9.0" in obstacle for obstacle in found.obstacles)


@pytest.mark.parametrize("fused", [True, False])
def test_where_nothing_is_in_the_way_fused_experts_are_tried(monkeypatch: pytest.MonkeyPatch, fused: bool):
    monkeypatch.setattr(backends, "fused_mxfp8_obstacles", lambda **_: [])
    monkeypatch.setattr(backends, "_runs_fused", lambda device: fused)
    assert backends.examine_fusion(Config(), "mxfp8", (10, 0), CPU).active is fused


@pytest.mark.parametrize(
    ("mode", "chosen", "reason"),
    [("bf16", "grouped_mm", "te cannot be used: broken"), ("fp8_current", None, "precision.mode=fp8_current: broken")],
)
def test_a_broken_transformer_engine_is_found_before_training_finds_it(
    monkeypatch: pytest.MonkeyPatch, mode: str, chosen: str | None, reason: str
):
    formats = PrecisionPolicy(mode, torch.bfloat16, te_recipe=RECIPES.get(mode))
    monkeypatch.setattr(backends, "precision_policy", lambda *_: formats)
    monkeypatch.setattr(backends, "choose_experts", lambda *_, **__: Choice("te or grouped_mm", "to be measured"))
    config = Config(precision=PrecisionConfig(mode="bf16"))
    found = backends.examine_experts(config, CPU, measure=False, te_problem="broken")
    assert found.chosen == chosen
    assert reason in found.reason
    assert found.obstacles["te"] == "broken"
    found = backends.examine_experts(config, CPU, measure=False, te_problem=None)
    assert found.chosen == "te or grouped_mm"


def test_fp8_without_transformer_engine_is_left_to_what_else_computes_it(monkeypatch: pytest.MonkeyPatch):
    formats = PrecisionPolicy("fp8_current", torch.bfloat16, te_recipe=RECIPES["fp8_current"])
    monkeypatch.setattr(backends, "precision_policy", lambda *_: formats)
    choice = Choice("te or scaled_mm or grouped_mm", "to be measured")
    monkeypatch.setattr(backends, "choose_experts", lambda *_, **__: choice)
    found = backends.examine_experts(Config(), CPU, measure=False, te_problem="broken")
    assert found.chosen == "scaled_mm or grouped_mm"
    assert "te cannot be used: broken" in found.reason


def test_a_package_that_fails_to_import_is_described_by_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "half_installed.py").write_text("raise OSError('libx.so: no such file\\nsecond line')")
    monkeypatch.syspath_prepend(tmp_path)
    assert software.import_problem("half_installed") == "failed to import (OSError: libx.so: no such file)"
    assert software.import_problem("never_installed.part") == "not installed"
    assert software.import_problem("json") is None


def test_a_missing_megatron_core_keeps_nobody_from_training_or_converting():
    (package,) = (one for one in software._PACKAGES if one[0] == "megatron-core")
    absent = software.Package(package[0], None, "not installed", package[2], package[3])
    ((name, version, text),) = report._software_rows(software.Software({}, (absent,), {}))
    assert (name, version) == ("megatron-core", "not installed")
    assert text == "only to compare with it, in benchmarks and tests; training and conversion do without"


def test_transformer_engines_own_reasons_are_kept_by_mode():
    def answers(available: bool, reason: str):
        return lambda *, return_reason: (available, reason)

    te = SimpleNamespace(
        is_fp8_available=answers(True, ""),
        is_fp8_block_scaling_available=answers(False, "old CUDA"),
        is_mxfp8_available=answers(True, ""),
        is_nvfp4_available=answers(False, "no Blackwell"),
    )
    assert software._te_problems(te) == {"fp8_block": "old CUDA", "nvfp4": "no Blackwell"}
