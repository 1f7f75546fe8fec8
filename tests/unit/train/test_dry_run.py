import re
from dataclasses import replace

import pytest

from moe_framework.config.schema import Config, DataConfig, ModelConfig, ParallelConfig, PrecisionConfig, TrainConfig
from moe_framework.train.dry_run import describe_sizes, state_bytes_per_rank
from moe_framework.train.model import count_parameters
from tests.unit.model.builders import SMALL, plain_decoder


def numbers(text: str) -> list[int]:
    return [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]*", text)]


@pytest.mark.parametrize(
    "sizes",
    [
        SMALL,
        replace(SMALL, tie_embeddings=True),
        replace(SMALL, head_dim=12, num_layers=3, top_k=5),
        replace(SMALL, num_experts=1, top_k=1, num_kv_heads=4),
    ],
    ids=["grouped_heads", "tied", "own_head_dim", "one_expert"],
)
def test_counts_are_those_of_the_real_model(sizes: ModelConfig):
    model = plain_decoder(sizes)
    total, active = count_parameters(model, top_k=sizes.top_k, num_experts=sizes.num_experts)
    experts = sum(p.numel() for block in model.layers for p in block.moe.experts.parameters())  # pyright: ignore
    assert total == sum(p.numel() for p in model.parameters())
    line = describe_sizes(Config(model=sizes, parallel=ParallelConfig(dp=1))).splitlines()[1]
    assert numbers(line) == [total, experts, active]


def test_mixtral_8x7b_has_its_published_size():
    # 46.7 billion parameters, of which 12.9 billion are used for a token; the embedding table multiplies nothing.
    (total, _, active) = numbers(describe_sizes(Config(parallel=ParallelConfig(dp=1))).splitlines()[1])
    assert total == 46_702_792_704
    assert active == 12_879_925_248 - 32_000 * 4096


def test_state_and_micro_steps_are_per_rank():
    config = Config(
        model=SMALL,
        parallel=ParallelConfig(dp=2, ep=4),
        data=DataConfig(seq_length=100),
        train=TrainConfig(global_batch_size=64, micro_batch_size=2),
    )
    lines = describe_sizes(config).splitlines()
    total = numbers(lines[1])[0]
    assert lines[0] == "ranks: 8 (dp=2, ep=4, tp=1)"
    # fp32: weight, gradient and two moments.
    assert numbers(lines[2])[0] == 4 * 4 * total // 8
    assert lines[3] == "a step: 64 rows, 6,400 tokens, 4 micro-steps"


def test_each_replica_holds_the_whole_state():
    def state(**degrees: int) -> int:
        return numbers(describe_sizes(Config(model=SMALL, parallel=ParallelConfig(**degrees))).splitlines()[2])[0]

    assert state(dp=4, ep=2, tp=2, dp_replicate=2) == state(dp=2, ep=2, tp=2)


@pytest.mark.parametrize(
    ("degrees", "mode", "copied"),
    [
        ({"dp": 1, "ep": 4}, "bf16", True),
        ({"dp": 1, "ep": 4}, "fp32", False),
        ({"dp": 2, "ep": 4}, "bf16", False),
        ({"dp": 2, "ep": 4, "dp_replicate": 2}, "bf16", False),
        ({"dp": 1, "ep": 2, "tp": 2}, "bf16", False),
        ({"dp": 1, "ep": 2, "tp": 2, "expert_tp": 2}, "bf16", True),
    ],
)
def test_experts_that_one_rank_holds_alone_keep_a_copy_in_the_compute_format(degrees, mode: str, copied: bool):
    config = Config(model=SMALL, parallel=ParallelConfig(**degrees), precision=PrecisionConfig(mode=mode))  # pyright: ignore
    total, experts, _ = numbers(describe_sizes(config).splitlines()[1])
    ranks = degrees["dp"] // degrees.get("dp_replicate", 1) * degrees["ep"] * degrees.get("tp", 1)
    assert state_bytes_per_rank(config) == (16 * total + (2 * experts if copied else 0)) // ranks
