"""What expert-block compares on which machine, and the sizes that it refuses."""

from dataclasses import replace

import pytest
import torch

from moe_framework.errors import ConfigError
from tools.benchmarks.expert_block import Options, plan

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OPTIONS = Options(
    device="auto",
    tokens=32,
    hidden_size=16,
    intermediate_size=16,
    top_k=2,
    num_experts=(8, 64),
    ep=None,
    dtypes=None,
    warmup=1,
    repetitions=1,
    threads=None,
    seed=0,
)


def test_cpu_compares_both_dtypes_and_two_and_four_ranks():
    todo = plan(OPTIONS, CPU, num_gpus=0)
    assert [(case.num_experts, case.dtype) for case in todo.experts] == [
        (8, "fp32"),
        (8, "bf16"),
        (64, "fp32"),
        (64, "bf16"),
    ]
    assert [(case.ep, case.num_experts, case.dtypes) for case in todo.dispatch] == [
        (2, 8, ("fp32", "bf16")),
        (4, 8, ("fp32", "bf16")),
    ]
    assert todo.skipped == []


def test_cuda_compares_bf16_on_all_gpus():
    todo = plan(OPTIONS, CUDA, num_gpus=4)
    assert {case.dtype for case in todo.experts} == {"bf16"}
    assert [(case.ep, case.dtypes) for case in todo.dispatch] == [(4, ("bf16",))]


def test_one_gpu_skips_dispatch_and_says_so():
    todo = plan(OPTIONS, CUDA, num_gpus=1)
    assert todo.dispatch == []
    assert todo.skipped == ["dispatch: there is one GPU, and it takes two to exchange tokens."]


def test_what_grouped_mm_cannot_compute_is_skipped_with_the_reason():
    todo = plan(replace(OPTIONS, dtypes=("fp32",), num_experts=(8,)), CUDA, num_gpus=2)
    assert todo.experts == []
    assert todo.skipped == [
        "experts, E=8, fp32: grouped_mm cannot be used: torch's CUDA kernel takes bfloat16, not torch.float32."
    ]


@pytest.mark.parametrize(
    ("changes", "device", "message"),
    [
        ({"top_k": 9}, CPU, "--top-k=9 must be at most --num-experts=8. Lower --top-k."),
        ({"ep": (3,)}, CPU, "--ep=3 must divide --num-experts=8. Use a divisor, or other experts."),
        ({"ep": (1,)}, CPU, "--ep=1 must be at least 2: one rank sends nothing. Use 2 or more."),
        ({"ep": (4,)}, CUDA, "--ep=4 needs 4 GPUs, but there are 2. Use --ep 2 or less."),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict, device: torch.device, message: str):
    with pytest.raises(ConfigError) as caught:
        plan(replace(OPTIONS, **changes), device, num_gpus=2)
    assert caught.value.violations == [message]


def test_all_violations_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        plan(replace(OPTIONS, top_k=65, ep=(3,)), CPU, num_gpus=0)
    assert len(caught.value.violations) == 3
