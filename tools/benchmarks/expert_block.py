"""The `expert-block` benchmark: expert backends, and dispatchers, against each other in one run."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist

from moe_framework.distributed.runtime import resolve_device
from moe_framework.errors import ConfigError
from tools.benchmarks.dispatch import DispatchCase, DispatchResult, compare_dispatch
from tools.benchmarks.experts import ExpertsCase, ExpertsResult, compare_experts, reason_to_skip
from tools.benchmarks.machine import Machine, describe
from tools.benchmarks.progress import ProgressLines
from tools.benchmarks.ranks import run_on_ranks


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        device: `auto`, `cpu` or `cuda`.
        tokens: T; of one rank in the dispatch part.
        hidden_size: D.
        intermediate_size: F.
        top_k: K.
        num_experts: E of each comparison of backends; the dispatch part takes the first.
        ep: Ranks of each comparison of dispatchers; None for 2 and 4 on a CPU, and for all GPUs.
        dtypes: `fp32`, `bf16`; None for both on a CPU, and for bf16 on a GPU.
        warmup: Repetitions that are not kept.
        repetitions: Repetitions that are.
        threads: Threads of torch for the backends on a CPU; None for torch's choice.
        seed: Of all tensors.
    """

    device: str
    tokens: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    num_experts: tuple[int, ...]
    ep: tuple[int, ...] | None
    dtypes: tuple[str, ...] | None
    warmup: int
    repetitions: int
    threads: int | None
    seed: int


@dataclass(frozen=True)
class Report:
    """What the benchmark found.

    Attributes:
        options: As asked.
        device_type: `cpu` or `cuda`.
        machine: Where it ran.
        experts: One result for each E and dtype.
        dispatch: One result for each ep and dtype.
        skipped: What was left out, and why, one sentence each.
    """

    options: Options
    device_type: str
    machine: Machine
    experts: list[ExpertsResult]
    dispatch: list[DispatchResult]
    skipped: list[str]


@dataclass(frozen=True)
class Plan:
    """The comparisons to make, and those left out, each with its reason."""

    experts: list[ExpertsCase]
    dispatch: list[DispatchCase]
    skipped: list[str]


def plan(options: Options, device: torch.device, num_gpus: int) -> Plan:
    """Decide what to compare.

    Args:
        options: The command line.
        device: What is measured.
        num_gpus: GPUs of this machine.

    Returns:
        The plan.

    Raises:
        ConfigError: Sizes that don't fit each other, or more ranks than GPUs.
    """
    on_cuda = device.type == "cuda"
    dtypes = options.dtypes or (("bf16",) if on_cuda else ("fp32", "bf16"))
    ep = options.ep or ((num_gpus,) if on_cuda else (2, 4))
    skipped: list[str] = []
    if on_cuda and options.ep is None and num_gpus == 1:
        ep = ()
        skipped.append("dispatch: there is one GPU, and it takes two to exchange tokens.")
    _check_sizes(options, ep, num_gpus if on_cuda else None)
    experts = []
    for num_experts, dtype in product(options.num_experts, dtypes):
        case = ExpertsCase(
            num_tokens=options.tokens,
            hidden_size=options.hidden_size,
            intermediate_size=options.intermediate_size,
            num_experts=num_experts,
            top_k=options.top_k,
            dtype=dtype,
            seed=options.seed,
        )
        reason = reason_to_skip(case, device)
        if reason is None:
            experts.append(case)
        else:
            skipped.append(f"experts, E={num_experts}, {dtype}: grouped_mm cannot be used: {reason}.")
    dispatch = [
        DispatchCase(
            ep=size,
            num_tokens=options.tokens,
            hidden_size=options.hidden_size,
            num_experts=options.num_experts[0],
            top_k=options.top_k,
            dtypes=dtypes,
            seed=options.seed,
        )
        for size in ep
    ]
    return Plan(experts, dispatch, skipped)


def _check_sizes(options: Options, ep: tuple[int, ...], num_gpus: int | None) -> None:
    violations = [
        f"--top-k={options.top_k} must be at most --num-experts={num_experts}. Lower --top-k."
        for num_experts in options.num_experts
        if options.top_k > num_experts
    ]
    for size in ep:
        if size < 2:
            violations.append(f"--ep={size} must be at least 2: one rank sends nothing. Use 2 or more.")
        if options.num_experts[0] % size:
            violations.append(
                f"--ep={size} must divide --num-experts={options.num_experts[0]}. Use a divisor, or other experts."
            )
        if num_gpus is not None and size > num_gpus:
            violations.append(f"--ep={size} needs {size} GPUs, but there are {num_gpus}. Use --ep {num_gpus} or less.")
    if violations:
        raise ConfigError(violations)


def run(options: Options) -> Report:
    """Make every comparison of the plan.

    Args:
        options: The command line.

    Returns:
        The results.

    Raises:
        ConfigError: See `plan` and `resolve_device`.
    """
    device = resolve_device(options.device, local_rank=0)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    todo = plan(options, device, torch.cuda.device_count() if device.type == "cuda" else 0)
    machine = describe(device)
    per_comparison = options.warmup + options.repetitions
    num_comparisons = len(todo.experts) + sum(len(case.dtypes) for case in todo.dispatch)
    progress = ProgressLines(per_comparison * num_comparisons)
    experts = [
        compare_experts(
            case,
            device,
            warmup=options.warmup,
            repetitions=options.repetitions,
            on_repetition=_advance(progress, f"experts E={case.num_experts} {case.dtype}"),
        )
        for case in todo.experts
    ]
    if device.type == "cuda":
        # The first rank shares this process's GPU.
        torch.cuda.empty_cache()
    dispatch: list[DispatchResult] = []
    for case in todo.dispatch:
        dispatch += run_on_ranks(
            _dispatch_on_rank, case.ep, device.type, case, options.warmup, options.repetitions, progress
        )
        progress.skip(per_comparison * len(case.dtypes))
    return Report(options, device.type, machine, experts, dispatch, todo.skipped)


def _advance(progress: ProgressLines, label: str) -> Callable[[], None]:
    return lambda: progress.advance(label)


def _dispatch_on_rank(
    group: dist.ProcessGroup,
    device: torch.device,
    case: DispatchCase,
    warmup: int,
    repetitions: int,
    progress: ProgressLines,
) -> list[DispatchResult]:
    def on_repetition(dtype: str) -> None:
        if group.rank() == 0:
            progress.advance(f"dispatch ep={case.ep} {dtype}")

    return compare_dispatch(case, group, device, warmup=warmup, repetitions=repetitions, on_repetition=on_repetition)
