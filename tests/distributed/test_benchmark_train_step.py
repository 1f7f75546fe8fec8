"""train-step on one and two gloo ranks: every contender trains on its tokens, and a failure does not end the run."""

import math
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_framework.distributed.mesh import ParallelMesh
from tests.helpers.pool import RankPool
from tools.benchmarks.train_step import measure, options, session
from tools.benchmarks.train_step.contender import Contender, Facts
from tools.benchmarks.train_step.session import Report, measure_contenders

pytest.importorskip("transformers", reason="needs the hf extra")

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CPU = torch.device("cpu")
SIZES = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.intermediate_size=16",
    "data.seq_length=16",
    "train.micro_batch_size=2",
)


def train(*overrides: str, peers: tuple[str, ...], ours: tuple[str, ...], breakdown: bool) -> Report:
    group = dist.group.WORLD
    assert group is not None
    asked = options.resolve(
        config_name="L0_sanity",
        overrides=[*SIZES, *overrides],
        config_dirs=(CONFIGS, None),
        num_ranks=group.size(),
        device="cpu",
        peers=peers,
        ours=ours,
        compile_model=None,
        peer_clipping=True,
        breakdown=breakdown,
        warmup=1,
        repetitions=8,
        seed=0,
        partial_file=None,
    )
    return measure_contenders(group, CPU, asked)


def check_rows(report: Report) -> None:
    for row in report.rows:
        assert row.error is None
        assert row.first_loss is not None
        assert row.last_loss is not None
        # Eight tokens, drawn uniformly: the loss begins near ln 8, and 16 repeated tokens are learnt in part.
        assert row.first_loss == pytest.approx(math.log(8), abs=0.5)
        assert row.last_loss < row.first_loss
        assert row.seconds is not None
        assert row.seconds.median == pytest.approx(statistics.median(row.step_seconds))
        rate = report.tokens_per_step / report.num_ranks / row.seconds.median
        assert row.tokens_per_second_per_gpu == pytest.approx(rate)
        for peer in report.rows:
            if peer.name in row.ratios:
                assert peer.tokens_per_second_per_gpu is not None
                assert row.ratios[peer.name] == pytest.approx(rate / peer.tokens_per_second_per_gpu)


def test_peers_and_ours_train_on_one_rank_and_one_that_cannot_is_a_row(ranks: RankPool):
    peers = ("hf_eager", "megatron_bf16", "hf_grouped_mm")
    (report,) = ranks.run(train, 1, "parallel.ep=1", peers=peers, ours=("fp32",), breakdown=False)
    failed = report.rows.pop(1)
    assert failed.name == "megatron_bf16"
    assert "does not run on a CPU" in failed.error
    assert [row.name for row in report.rows] == ["hf_eager", "hf_grouped_mm", "ours:fp32"]
    check_rows(report)
    assert set(report.rows[-1].ratios) == {"hf_eager", "hf_grouped_mm"}
    assert len({row.num_parameters for row in report.rows}) == 1


@pytest.mark.slow
def test_two_ranks_agree_on_every_row(ranks: RankPool):
    first, second = ranks.run(train, 2, "model.qk_norm=true", peers=("hf_eager",), ours=("bf16",), breakdown=True)
    check_rows(first)
    assert first.tokens_per_step == 2 * 2 * 16
    assert [row.step_seconds for row in first.rows] == [row.step_seconds for row in second.rows]
    assert [row.last_loss for row in first.rows] == [row.last_loss for row in second.rows]
    assert len({row.num_parameters for row in first.rows}) == 1
    parts = {part.name: part for part in first.rows[-1].breakdown.parts}
    assert {"experts", "attention", "token exchange", "optimizer", "head and loss"} <= set(parts)


def mesh_of_ours() -> list[tuple[int, ...]]:
    meshes: list[ParallelMesh] = []

    def record(_config: Any, mesh: ParallelMesh, *_: Any, **_options: Any) -> Contender:
        meshes.append(mesh)
        raise RuntimeError("seen")

    with mock.patch.object(session, "build_ours", record):
        train("parallel.ep=1", "parallel.tp=2", "parallel.expert_tp=2", peers=(), ours=("fp32",), breakdown=False)
    return [(mesh.tp.size(), mesh.expert_tp, mesh.expert.size()) for mesh in meshes]


def test_our_mesh_has_every_degree_of_the_configuration(ranks: RankPool):
    assert ranks.run(mesh_of_ours, 2) == [[(2, 2, 1)]] * 2


def peak_of_a_contender() -> tuple[int | None, int | None]:
    """On a machine where 1,000 bytes were left allocated, and a step reached 5,000."""

    def build() -> Contender:
        return Contender(lambda: 1.0, 1, Facts("bf16", "fp32", True, "fp32", "", ""))

    def trained(*_: Any) -> tuple[list[float], list[float], int]:
        return [1.0], [1.0], 5000

    with mock.patch.object(measure, "_allocated", return_value=1000), mock.patch.object(measure, "_train", trained):
        row = measure.measure("x", build, CPU, warmup=1, repetitions=1, tokens_per_gpu=1, flops_per_token=1)
    return row.peak_bytes, row.allocated_before_bytes


def test_the_peak_does_not_count_what_earlier_contenders_left(ranks: RankPool):
    assert ranks.run(peak_of_a_contender, 1) == [(4000, 1000)]


def fail_on_rank_1() -> list[str | None]:
    def build(fails: bool) -> Contender:
        def step() -> float:
            if fails and dist.get_rank() == 1:
                raise RuntimeError("out of memory")
            return 1.0

        return Contender(step, 1, Facts("bf16", "fp32", True, "fp32", "", ""))

    rows = [
        measure.measure(
            "x", lambda fails=fails: build(fails), CPU, warmup=1, repetitions=1, tokens_per_gpu=1, flops_per_token=1
        )
        for fails in (True, False)
    ]
    return [row.error for row in rows]


def test_a_failure_on_one_rank_is_known_to_all_and_the_next_contender_runs(ranks: RankPool):
    assert ranks.run(fail_on_rank_1, 2) == [["rank 1: RuntimeError: out of memory", None]] * 2
