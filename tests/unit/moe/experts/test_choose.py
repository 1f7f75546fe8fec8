from dataclasses import replace

import pytest
import torch

from moe_framework.errors import ConfigError, MoeFrameworkError
from moe_framework.moe.experts import choose
from moe_framework.moe.experts.choose import ExpertShape, choose_experts, make_backend
from moe_framework.moe.experts.grouped_mm import grouped_mm_experts, unsupported_reason
from moe_framework.moe.experts.mxfp8_emulated import mxfp8_emulated_experts
from moe_framework.moe.experts.scaled_mm import scaled_mm_experts
from moe_framework.precision.modes import EMULATED
from moe_framework.precision.policy import PrecisionPolicy, precision_policy
from moe_framework.precision.recipes import RECIPES

CPU = torch.device("cpu")
SHAPE = ExpertShape(num_local_experts=2, hidden_size=32, intermediate_size=64, num_rows=128)
FP32 = precision_policy("fp32", CPU)
BF16 = precision_policy("bf16", CPU)


@pytest.mark.parametrize(
    ("sizes", "policy", "named"),
    [
        ({"hidden_size": 34}, FP32, "hidden_size=34 is no multiple of 4"),
        ({"intermediate_size": 30}, FP32, "intermediate_size=30 is no multiple of 4"),
        ({"hidden_size": 36}, BF16, "hidden_size=36 is no multiple of 8"),
    ],
)
def test_unaligned_sizes_are_named(sizes: dict[str, int], policy: PrecisionPolicy, named: str):
    shape = replace(SHAPE, **sizes)
    with pytest.raises(
        ConfigError, match=rf"experts\.backend=grouped_mm cannot be used: {named}.*experts\.backend=auto"
    ):
        choose_experts("grouped_mm", shape, policy, CPU)
    automatic = choose_experts("auto", shape, policy, CPU)
    assert automatic.name == "loop"
    assert named in automatic.reason
    assert choose_experts("loop", shape, policy, CPU).name == "loop"


def test_grouped_mm_is_refused_for_what_the_cuda_kernel_does_not_take():
    sizes = {"hidden_size": 32, "intermediate_size": 32}
    assert unsupported_reason(**sizes, dtype=torch.bfloat16, device_type="cuda") is None
    assert "float32" in (unsupported_reason(**sizes, dtype=torch.float32, device_type="cuda") or "")


def test_what_is_called_unaligned_is_what_torch_refuses():
    """Should torch lift the rule, this test says so."""
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        torch.nn.functional.grouped_mm(torch.ones(2, 5), torch.ones(1, 5, 4), offs=torch.tensor([2], dtype=torch.int32))


def test_auto_takes_grouped_mm_on_a_cpu_and_says_why_not_te():
    automatic = choose_experts("auto", SHAPE, FP32, CPU)
    assert automatic.name == "grouped_mm"
    assert "te cannot be used: Transformer Engine needs a CUDA device" in automatic.reason
    assert make_backend("grouped_mm", SHAPE, FP32) is grouped_mm_experts


def test_te_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"experts\.backend=te cannot be used: Transformer Engine needs a CUDA"):
        choose_experts("te", SHAPE, BF16, CPU)


def test_te_without_its_package_is_a_dependency_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MoeFrameworkError, match="transformer_engine, which failed to import") as caught:
        choose_experts("te", SHAPE, BF16, torch.device("cuda"))
    assert type(caught.value).__name__ == "DependencyError"


@pytest.mark.parametrize("winner", ["te", "grouped_mm", "sequential"])
def test_auto_takes_the_fastest_and_shows_all_times(winner: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: object())
    for times in ({"te": 4.0, "grouped_mm": 3.0, "sequential": 5.0} | {winner: 2.0},):
        monkeypatch.setattr(choose, "milliseconds", lambda name, make, times=times, **_: times[name])
        chosen = choose_experts("auto", SHAPE, BF16, torch.device("cuda"))
        assert chosen.name == winner
        assert f"te in bf16 {times['te']:.2f} ms" in chosen.reason
        assert f"grouped_mm in bf16 {times['grouped_mm']:.2f} ms" in chosen.reason
        assert f"sequential in bf16 {times['sequential']:.2f} ms" in chosen.reason


def test_auto_continues_with_a_checkpoints_backend_without_timing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(choose, "milliseconds", lambda name, make, **_: pytest.fail("timed"))
    for name in ("te", "grouped_mm"):
        assert choose_experts("auto", SHAPE, BF16, torch.device("cuda"), preferred=name).name == name


def test_auto_says_so_when_every_candidate_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(choose, "milliseconds", lambda name, make, **_: float("inf"))
    with pytest.raises(ConfigError, match="none of te, grouped_mm, sequential computes these experts"):
        choose_experts("auto", SHAPE, BF16, torch.device("cuda"))


@pytest.mark.parametrize("name", ["loop", "grouped_mm"])
def test_a_named_backend_does_not_drop_the_quantization(name: str):
    fp8 = PrecisionPolicy("fp8_current", torch.bfloat16, te_recipe=RECIPES["fp8_current"])
    with pytest.raises(ConfigError, match=rf"experts\.backend={name} computes in bf16.*fp8_current would not be"):
        choose_experts(name, SHAPE, fp8, torch.device("cuda"))
    with pytest.raises(ConfigError, match="would not be emulated"):
        choose_experts(name, SHAPE, precision_policy(EMULATED, CPU), CPU)


def test_auto_does_not_drop_the_quantization_for_want_of_a_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)
    block = PrecisionPolicy("fp8_block", torch.bfloat16, te_recipe=RECIPES["fp8_block"])
    for policy, package in ((block, "transformer_engine"), (precision_policy(EMULATED, CPU), "torchao")):
        with pytest.raises(MoeFrameworkError, match=rf"precision\.mode={policy.mode}.*{package}") as caught:
            choose_experts("auto", SHAPE, policy, torch.device("cuda"))
        assert type(caught.value).__name__ == "DependencyError"


FP8 = PrecisionPolicy("fp8_current", torch.bfloat16, te_recipe=RECIPES["fp8_current"])
CUDA = torch.device("cuda")


def test_fp8_with_current_scales_needs_no_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(choose, "milliseconds", lambda name, make, **_: 1.0 if name == "scaled_mm" else 2.0)
    chosen = choose_experts("auto", SHAPE, FP8, CUDA)
    assert chosen.name == "scaled_mm"
    assert "scaled_mm in fp8_current 1.00 ms" in chosen.reason
    assert "te in" not in chosen.reason
    assert choose_experts("scaled_mm", SHAPE, FP8, CUDA).name == "scaled_mm"
    assert make_backend("scaled_mm", SHAPE, FP8) is scaled_mm_experts


def test_a_run_that_trained_in_fp8_does_not_go_on_in_bf16_because_te_is_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(choose, "milliseconds", lambda name, make, **_: 2.0 if name == "scaled_mm" else 1.0)
    assert choose_experts("auto", SHAPE, FP8, CUDA, preferred="te").name == "scaled_mm"
    assert choose_experts("auto", SHAPE, FP8, CUDA).name == "grouped_mm"


def test_auto_does_not_drop_the_quantization_because_it_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: object())
    failing = {"te": float("inf"), "scaled_mm": float("inf")}
    monkeypatch.setattr(choose, "milliseconds", lambda name, make, **_: failing.get(name, 1.0))
    with pytest.raises(ConfigError, match=r"precision\.mode=fp8_current: te and scaled_mm failed on this device"):
        choose_experts("auto", SHAPE, FP8, CUDA)


def test_what_would_still_stand_in_the_way_is_named_rather_than_a_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"fp8_current cannot be used: model\.hidden_size=24 is no multiple of 16"):
        choose_experts("auto", replace(SHAPE, hidden_size=24), FP8, CUDA)


def test_master_weights_are_timed_as_such(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(choose, "milliseconds", lambda name, make, **sizes: seen.append(sizes["weight_dtype"]) or 1.0)
    choose_experts("auto", SHAPE, BF16, CUDA)
    choose_experts("auto", replace(SHAPE, float32_weights=True), BF16, CUDA)
    assert set(seen[: len(seen) // 2]) == {torch.bfloat16}
    assert set(seen[len(seen) // 2 :]) == {torch.float32}


@pytest.mark.parametrize("name", sorted(choose.QUANTIZED))
def test_what_quantizes_by_itself_refuses_a_layer_of_another_mode(name: str):
    with pytest.raises(ConfigError, match=rf"experts\.backend={name} computes in .* alone, not in bf16"):
        make_backend(name, SHAPE, BF16)
    assert make_backend(choose.PLAIN_INSTEAD[name], SHAPE, BF16) in choose.BACKENDS.values()


@pytest.mark.parametrize(
    ("shape", "policy", "device", "named"),
    [
        (SHAPE, BF16, CUDA, "it computes precision.mode=fp8_current, not bf16"),
        (SHAPE, FP8, CPU, "its products need a CUDA device"),
        (replace(SHAPE, hidden_size=24), FP8, CUDA, "model.hidden_size=24 is no multiple of 16, which FP8 needs"),
    ],
)
def test_scaled_mm_says_why_it_cannot_be_used(shape, policy, device, named: str):
    with pytest.raises(ConfigError, match=rf"experts\.backend=scaled_mm cannot be used: {named}"):
        choose_experts("scaled_mm", shape, policy, device)


def test_widths_that_the_format_cannot_block_are_named():
    for shape, named in (
        (replace(SHAPE, hidden_size=24), "hidden_size=24 is no multiple of 32"),
        (replace(SHAPE, intermediate_size=40), "intermediate_size=40 is no multiple of 32"),
        (
            replace(SHAPE, intermediate_size=40, expert_tp=2),
            r"model\.intermediate_size/parallel\.expert_tp=80/2=40 is no multiple of 32",
        ),
    ):
        with pytest.raises(ConfigError, match=named):
            choose_experts("auto", shape, precision_policy(EMULATED, CPU), CPU)


def test_emulation_is_computed_by_its_own_backend_alone():
    policy = precision_policy(EMULATED, CPU)
    assert choose_experts("auto", SHAPE, policy, CPU).name == EMULATED
    assert make_backend(EMULATED, SHAPE, policy) is mxfp8_emulated_experts
    with pytest.raises(ConfigError, match="would not be emulated"):
        choose_experts("grouped_mm", SHAPE, policy, CPU)
