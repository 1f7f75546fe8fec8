"""expert-block --shape: every contender is a row, with a rate and a share, or with the reason why not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_framework.errors import ConfigError
from tools.benchmarks import expert_rates, expert_rates_report
from tools.benchmarks.ceilings import Ceilings
from tools.benchmarks.commands.expert_block import SHAPES
from tools.benchmarks.expert_rates import RatesOptions, RatesReport
from tools.benchmarks.experts import ExpertsCase

CASE = ExpertsCase(num_tokens=16, hidden_size=16, intermediate_size=16, num_experts=4, top_k=2, dtype="bf16", seed=0)
CEILINGS = Ceilings(256, bf16_flops=1e9, fp8_flops=2e9, copy_bytes=1e9, exchange_bytes=None)


@pytest.fixture(scope="module")
def found() -> RatesReport:
    contenders = ("loop:bf16", "grouped_mm:bf16", "te:fp8_current", "te.ops:bf16")
    monkeypatch = pytest.MonkeyPatch()
    ceilings = iter([CEILINGS, replace(CEILINGS, bf16_flops=4e9)])
    monkeypatch.setattr(expert_rates, "measure_ceilings", lambda device: next(ceilings))
    try:
        return expert_rates.run(RatesOptions("cpu", {"tiny": CASE}, contenders, warmup=1, repetitions=2))
    finally:
        monkeypatch.undo()


def test_ours_have_times_and_agree_with_the_loop(found: RatesReport):
    loop, grouped, *_ = found.rows
    for row in (loop, grouped):
        assert row.error is None
        assert row.seconds is not None
        assert row.flops == pytest.approx(CASE.flop / row.seconds.median)
        assert row.output_difference is not None
        assert row.output_difference < 0.01  # three roundings to bf16, of half of 2⁻⁷ each
    assert loop.output_difference == 0


def test_the_share_is_of_the_higher_of_the_rates_before_and_after(found: RatesReport):
    assert found.rows[0].flops is not None
    assert found.rows[0].share_of_dense == pytest.approx(found.rows[0].flops / 4e9)


def test_what_needs_a_gpu_is_a_row_that_says_so(found: RatesReport):
    te, peer = found.rows[2:]
    assert te.error == "ConfigError: experts.backend=te needs a CUDA device."
    assert not te.is_peer
    assert peer.error == "ConfigError: te.ops:bf16 needs a CUDA device."
    assert peer.is_peer


@pytest.mark.parametrize("contender", ["loop", "no_such:bf16", "te:fp9"])
def test_a_contender_that_does_not_exist_is_refused_before_anything_is_measured(contender: str):
    with pytest.raises(ConfigError, match=f"--contenders={contender} must be NAME:MODE"):
        expert_rates.run(RatesOptions("cpu", {"tiny": CASE}, (contender,), warmup=1, repetitions=1))


def test_report_json_and_chart_have_every_row(found: RatesReport, tmp_path: Path):
    pytest.importorskip("matplotlib")
    text = expert_rates_report.to_markdown(found)
    assert "### tiny: T=16, D=16, F=16, E=4, K=2" in text
    assert all(f"{row.contender} |" in text for row in found.rows)
    expert_rates_report.write_json(found, tmp_path / "x.json")
    assert len(json.loads((tmp_path / "x.json").read_text())["rows"]) == 4
    expert_rates_report.write_chart(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_named_shapes_are_those_of_the_published_models():
    assert SHAPES == {"mixtral": (16384, 4096, 14336, 8, 2), "fine": (16384, 2048, 768, 128, 8)}
