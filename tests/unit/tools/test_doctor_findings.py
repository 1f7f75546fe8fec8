"""What the doctor concludes from machines that are not here."""

from dataclasses import replace
from pathlib import Path

import pytest

from moe_framework.config.load import load_config
from moe_framework.config.schema import Config
from moe_framework.precision.modes import AUTO8, MODES
from tools.diagnosis.configuration import choose_ranks, describe, torchao_violations, validate_here
from tools.diagnosis.machine import Gpu, Machine, parse_nvlinks
from tools.diagnosis.precision import ModeFinding, examine_modes, resolved_here

CONFIGS = Path(__file__).parents[3] / "configs"
GIB = 2**30
H200 = Gpu("NVIDIA H200", 140 * GIB, (9, 0))
HOST = Machine("a CPU", 16, 64 * GIB, (), None, (), (), "/usr/bin/cc", python_headers=True)
EIGHT = replace(HOST, gpus=(H200,) * 8)


def config_of(name: str, *overrides: str) -> Config:
    return load_config(name, overrides, CONFIGS)


def violations(config: Config, machine: Machine, ranks: int | None = None) -> str:
    return "\n".join(validate_here(config, machine, ranks or choose_ranks(config, machine))[1])


def modes(capability, **problems) -> dict[str, ModeFinding]:
    none = {"te_problem": None, "emulation_problem": None, "te_problems": {}}
    return {found.mode: found for found in examine_modes(capability, "a device", **(none | problems))}


@pytest.mark.parametrize(
    ("capability", "missing"),
    [
        (None, {"fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "auto8"}),
        ((8, 0), {"fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "auto8"}),
        ((9, 0), {"mxfp8", "nvfp4"}),
        ((10, 0), {"fp8_block"}),
    ],
)
def test_modes_of_a_device(capability, missing: set[str]):
    found = modes(capability)
    assert list(found) == [*MODES, AUTO8]
    assert {mode for mode, finding in found.items() if not finding.available} == missing
    assert all(found[mode].reason for mode in missing)
    assert (found["bf16"].reason, found["fp32"].reason) == (None, None)


def test_a_missing_mode_says_what_it_needs_and_what_there_is():
    assert modes((9, 0))["mxfp8"].reason == "needs compute capability 10.0 or newer; a device has 9.0"


def test_auto8_says_what_it_becomes():
    assert modes((9, 0))["auto8"].reason == "is fp8_current here"
    assert modes((10, 0))["auto8"].reason == "is mxfp8 here"
    assert (resolved_here("auto8", (9, 0)), resolved_here("auto8", None)) == ("fp8_current", None)


def test_without_transformer_engine_only_what_torch_computes_is_left():
    found = modes((9, 0), te_problem="TE is missing", emulation_problem="torchao is missing")
    assert {mode for mode, finding in found.items() if finding.available} == {"fp32", "bf16"}
    assert found["fp8_current"].reason == found["auto8"].reason == "TE is missing"
    assert found["mxfp8_emulated"].reason == "torchao is missing"
    assert "10.0" in (found["mxfp8"].reason or "")


def test_what_transformer_engine_says_of_a_mode_counts():
    found = modes((9, 0), te_problems={"fp8_block": "needs a newer CUDA"})
    assert found["fp8_block"] == ModeFinding("fp8_block", available=False, reason="needs a newer CUDA")
    assert found["fp8_current"].available


def test_links_are_counted_per_gpu():
    text = (
        "GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-2)\n\t Link 0: <inactive>\n"
    )
    found = parse_nvlinks(text)
    assert [(gpu.gpu, gpu.links, gpu.gigabytes_per_s) for gpu in found] == [(0, 2, 53.124), (1, 0, 0)]
    assert parse_nvlinks("") == ()


def test_a_configuration_for_eight_gpus_fits_eight_gpus():
    assert violations(config_of("L1_8x7B_ep"), EIGHT) == ""


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (replace(EIGHT, gpus=(H200,) * 2), "this host shows 2 CUDA devices for 8 ranks"),
        (replace(EIGHT, gpus=(replace(H200, capability=(8, 0)),) * 8), "precision.mode=auto8 needs compute capability"),
        (replace(EIGHT, gpus=(replace(H200, memory_bytes=80 * GIB),) * 8), "keeps 87.0 GiB of weights"),
        (replace(EIGHT, host_compiler=None), "no C compiler (cc, gcc or clang)"),
        (replace(EIGHT, python_headers=False), "Python.h, which is missing"),
        (HOST, "needs a GPU for each of the 8 ranks, and this host has 0 GPUs"),
    ],
)
def test_what_a_host_lacks_is_named(machine: Machine, expected: str):
    assert expected in violations(config_of("L1_8x7B_ep"), machine)


def test_memory_of_a_cpu_is_shared_by_its_ranks():
    # 1.8 million parameters of 16 bytes: half of them on each of two ranks, all of them on one host.
    config = config_of("L0_sanity", "device=cpu")
    state = 1_842_304 * 16
    assert violations(config, replace(HOST, memory_bytes=state)) == ""
    assert "2 ranks" not in violations(config, replace(HOST, memory_bytes=state - 1))
    assert "of weights, gradients and optimizer" in violations(config, replace(HOST, memory_bytes=state - 1))


def test_rules_between_keys_and_what_the_host_lacks_are_reported_together():
    text = violations(config_of("L1_8x7B_ep", "model.top_k=9", "optim.lr=0", "data.path=/no/such.fa"), HOST)
    for expected in ("model.top_k=9", "optim.lr=0", "data.path=/no/such.fa: no such file", "auto8", "0 GPUs"):
        assert expected in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("checkpoint.init_from=/no/such", "checkpoint.init_from=/no/such: no such file or folder"),
        ("checkpoint.resume=/no/such", "checkpoint.resume=/no/such: no such file or folder"),
        ("checkpoint.ckpt_dir=/dev/null/x", "checkpoint.ckpt_dir: cannot write /dev/null/x"),
        ("run.dir=/dev/null/x", "run.dir: cannot write /dev/null/x/L0_sanity"),
    ],
)
def test_files_and_folders_are_looked_at(override: str, expected: str):
    assert expected in violations(config_of("L0_sanity", override), HOST)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["precision.mode=mxfp8_emulated"], ["precision.mode=mxfp8_emulated: it needs torchao."]),
        (
            ["precision.mode=mxfp8_emulated", "precision.attention=quantized"],
            ["precision.attention=quantized: it needs torchao."],
        ),
        ([], []),
    ],
)
def test_the_key_that_needs_torchao_is_named(overrides: list[str], expected: list[str]):
    config = config_of("L0_sanity", *overrides)
    assert torchao_violations(config, "it needs torchao") == expected
    assert torchao_violations(config, None) == []


def test_automatic_dp_takes_as_many_gpus_as_the_batch_allows():
    # Sixteen rows in micro-batches of four make four ranks at most.
    assert choose_ranks(config_of("L0_sanity"), EIGHT) == 4
    assert choose_ranks(config_of("L0_sanity"), HOST) == 2
    assert choose_ranks(config_of("L0_sanity", "parallel.dp=1"), EIGHT) == 2
    assert choose_ranks(config_of("L1_8x7B_ep"), replace(EIGHT, gpus=(H200,))) == 8


def test_a_configuration_for_another_machine_is_not_held_against_this_one():
    planned = config_of("L1_8x7B_ep", "hardware.target=h200", "train.dry_run=true")
    assert violations(planned, HOST) == ""
    large = config_of(
        "L1_8x7B_fsdp", "parallel.dp=8", "hardware.target=h200", "train.dry_run=true", "train.compile=true"
    )
    assert violations(large, replace(HOST, host_compiler=None)) == ""
    assert "hardware.target=a100 has 8.0" in violations(
        config_of("L1_8x7B_ep", "hardware.target=a100", "train.dry_run=true"), HOST
    )


def test_the_memory_estimate_is_compared_with_the_smallest_gpu_here_or_with_the_target():
    small = replace(H200, name="NVIDIA A10", memory_bytes=24 * GIB)
    here = validate_here(config_of("L1_8x7B_ep2_4layers"), EIGHT, 2)[0]
    assert "  one NVIDIA H200                       150.3\n" in (describe(here, EIGHT) or "")
    text = describe(here, replace(EIGHT, gpus=(H200, small))) or ""
    assert "WARNING: the estimate, " in text
    assert " GB, is above the 25.8 GB of one NVIDIA A10. " in text
    planned = config_of("L1_8x7B_ep", "hardware.target=b200", "train.dry_run=true")
    text = describe(validate_here(planned, EIGHT, 8)[0], EIGHT) or ""
    assert "  one B200 (data sheet)                 180.0\n" in text
    assert "(experts by te)" in text


def test_without_a_gpu_the_estimate_stands_alone():
    text = describe(validate_here(config_of("L0_sanity"), HOST, 2)[0], HOST) or ""
    assert "  no GPU to compare it with; hardware.target names one\n" in text
    assert describe(None, HOST) is None
