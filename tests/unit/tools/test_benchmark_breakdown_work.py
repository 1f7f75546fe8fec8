"""The work that each part has to do, against the count that training reports and against sums by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from moe_framework.config.load import load_config
from moe_framework.config.schema import Config
from moe_framework.config.validate import validate
from moe_framework.observe.throughput import flops_per_token
from tools.benchmarks.breakdown import ranges
from tools.benchmarks.breakdown.work import work_of_parts
from tools.benchmarks.train_step.contender import active_parameters

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def config(*overrides: str, num_ranks: int = 2) -> Config:
    return validate(load_config("L1_8x7B_ep2_4layers", overrides, CONFIGS), world_size=num_ranks)


@pytest.mark.parametrize("overrides", [(), ("model.qk_norm=true", "model.head_dim=64", "model.vocab_size=151936")])
def test_the_parts_operations_are_those_of_the_whole_model_but_for_the_router(overrides: tuple[str, ...]):
    whole = config(*overrides)
    sizes = whole.model
    found = sum(work.amount for work in work_of_parts(whole, 2).values() if work.unit == "FLOP")
    each_token = flops_per_token(
        active_parameters(sizes), sizes.num_layers, sizes.num_heads, sizes.resolved_head_dim, whole.data.seq_length
    )
    router = 6 * sizes.num_layers * sizes.hidden_size * sizes.num_experts
    tokens_per_rank = whole.train.global_batch_size * whole.data.seq_length / 2
    assert found == pytest.approx(tokens_per_rank * (each_token - router))


def test_active_parameters_of_mixtral_are_those_it_is_known_for():
    # 12.9e9 with the embedding table of 32,000 · 4,096, and without the norms.
    assert active_parameters(Config().model) + 32000 * 4096 == pytest.approx(12.88e9, rel=1e-3)


@pytest.mark.parametrize(("mode", "fp8"), [("bf16", False), ("fp8_current", True), ("auto8", True)])
def test_only_the_experts_are_measured_by_the_fp8_rate(mode: str, fp8: bool):
    plain = config()
    work = work_of_parts(replace(plain, precision=replace(plain.precision, mode=mode)), 2)  # pyright: ignore
    assert work[ranges.EXPERTS].fp8 is fp8
    assert not any(part.fp8 for name, part in work.items() if name != ranges.EXPERTS)


def test_tokens_are_exchanged_only_with_expert_parallelism():
    work = work_of_parts(config(), 2)[ranges.EXCHANGE]
    copies = 4 * 4096 * 2
    # Half of the copies stay; there and back, forward and backward, in each of four layers, in bf16.
    assert work.amount == 4 * 4 * copies * 4096 * 2 / 2
    assert ranges.EXCHANGE not in work_of_parts(config("parallel.ep=1", num_ranks=1), 1)


def test_experts_that_a_rank_has_to_itself_are_not_fsdps():
    alone, shared = (
        work_of_parts(config("train.global_batch_size=16", num_ranks=2 * dp), 2 * dp)[ranges.SHARDING].amount
        for dp in (1, 2)
    )
    expert_parameters = 4 * 8 * 3 * 4096 * 14336
    assert alone < expert_parameters
    # Sharded in two, each rank gathers half of them twice and writes their gradients: more than 6 bytes each.
    assert shared > 6 * expert_parameters
