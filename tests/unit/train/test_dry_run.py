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
    assert lines[0] == "ranks: 8 (dp=2, ep=4, tp=1)"
    assert numbers(lines[2])[0] == state_bytes_per_rank(config)
    assert lines[3] == "a step: 64 rows, 6,400 tokens, 4 micro-steps"


def test_each_replica_holds_the_whole_state():
    def state(**degrees: int) -> int:
        return numbers(describe_sizes(Config(model=SMALL, parallel=ParallelConfig(**degrees))).splitlines()[2])[0]

    assert state(dp=4, ep=2, tp=2, dp_replicate=2) == state(dp=2, ep=2, tp=2)


@pytest.mark.parametrize(("dp", "ep"), [(1, 1), (2, 1), (2, 4)])
def test_state_is_fp32_weight_gradient_and_two_moments_of_all_parameters(dp: int, ep: int):
    # Sizes that all ranks share evenly.
    sizes = replace(SMALL, vocab_size=16)
    config = Config(model=sizes, parallel=ParallelConfig(dp=dp, ep=ep), precision=PrecisionConfig(mode="bf16"))
    total, _, _ = numbers(describe_sizes(config).splitlines()[1])
    assert state_bytes_per_rank(config) * dp * ep == 16 * total
