"""What train-step measures: the configuration with its changes, one micro-batch a step, checked before ranks start."""

from pathlib import Path
from typing import Any

import pytest

from moe_framework.errors import ConfigError
from tools import benchmark
from tools.benchmarks.train_step.options import Options, resolve

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


# What `resolve` takes beside a configuration and the number of ranks.
MEASUREMENT: dict[str, Any] = {
    "device": "cpu",
    "peers": ["hf_eager"],
    "ours": None,
    "compile_model": None,
    "peer_clipping": False,
    "breakdown": False,
    "warmup": 1,
    "repetitions": 2,
    "seed": 0,
    "partial_file": None,
}


def resolved(**changes: Any) -> Options:
    config = {"config_name": "L0_sanity", "overrides": [], "config_dirs": (CONFIGS, None), "num_ranks": 2}
    return resolve(**(config | MEASUREMENT | changes))


def test_peers_come_first_and_ours_in_the_order_of_the_modes():
    assert resolved(ours=["bf16", "fp32"]).contenders == ("hf_eager", "ours:bf16", "ours:fp32")
    assert resolved(peers=[]).contenders == ("ours:fp32",)


def test_a_step_is_one_micro_batch_per_rank():
    options = resolved(overrides=["train.micro_batch_size=3"])
    assert options.config.train.global_batch_size == 6
    assert options.config.parallel.dp == 1


def test_each_mode_gets_its_own_configuration():
    options = resolved(ours=["fp32", "bf16"])
    assert options.config.precision.mode == "fp32"
    assert options.config_for("bf16").precision.mode == "bf16"
    assert options.config_for("bf16").model == options.config.model


@pytest.mark.parametrize(("asked", "expected"), [(None, False), (True, True)])
def test_compile_beats_the_configuration_only_where_it_is_given(asked: bool | None, expected: bool):
    assert resolved(compile_model=asked).config.train.compile is expected


def test_published_ratios_need_the_peer_that_they_are_relative_to():
    assert resolved(published=[("x", 2.0)]).published == (("x", 2.0),)
    with pytest.raises(ConfigError, match="ratios to hf_eager, which must run beside them"):
        resolved(peers=["hf_grouped_mm"], published=[("x", 2.0)])


def test_a_configuration_that_does_not_fit_the_ranks_is_refused():
    with pytest.raises(ConfigError, match=r"parallel\.dp·ep·tp"):
        resolved(num_ranks=1, overrides=["parallel.dp=1", "parallel.ep=2"])


def test_no_contender_at_all_is_refused():
    with pytest.raises(ConfigError, match="--peers and --ours are both empty"):
        resolved(peers=[], ours=[])


def test_a_precision_mode_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"--ours=fp9 must be one of fp32, bf16, .*auto8"):
        resolved(ours=["bf16", "fp9"])


def test_overrides_may_stand_anywhere_among_the_options():
    line = "train-step model.num_layers=2 --config-name X --nproc 2 parallel.ep=1 --peers hf_eager --ours bf16 fp32"
    arguments = benchmark.parse(line.split())
    assert arguments.overrides == ["model.num_layers=2", "parallel.ep=1"]
    assert (arguments.config_name, arguments.peers, arguments.ours) == ("X", ["hf_eager"], ["bf16", "fp32"])


@pytest.mark.parametrize("argv", [["train-step", "--config-name", "X", "--nprocs"], ["expert-block", "a=b"]])
def test_what_is_neither_option_nor_override_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        benchmark.parse(argv)
    assert caught.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
