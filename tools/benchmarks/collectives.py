"""The `collectives` benchmark: the exchanges that training is made of, alone, by size."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_framework.distributed.runtime import launch_environment
from moe_framework.errors import ConfigError
from moe_framework.moe.dispatch.all_to_all import AllToAllDispatcher
from tools.benchmarks.dispatch import DispatchCase, exchange, make_problem, slowest, traffic_of_all_ranks
from tools.benchmarks.machine import Machine, describe
from tools.benchmarks.ranks import measure_on_ranks
from tools.benchmarks.timing import Spread, interleave

MEGABYTE = 10**6
DISPATCH_FORWARD, DISPATCH_BOTH = "dispatch + combine, forward", "dispatch + combine, forward and backward"


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        device: `auto`, `cpu` or `cuda`.
        num_ranks: Ranks.
        megabytes: Sizes per rank, in 10⁶ bytes; None for 1, 16, 128 and 256 on GPUs, and 1 on a CPU.
        tokens: T of a rank in our dispatch; None for 16,384 on GPUs, and 512 on a CPU. The others alike.
        hidden_size: D.
        num_experts: E.
        top_k: K.
        warmup: Repetitions that are not kept.
        repetitions: Repetitions that are.
        seed: Of tokens and routing.
    """

    device: str
    num_ranks: int
    megabytes: tuple[int, ...] | None
    tokens: int | None
    hidden_size: int | None
    num_experts: int
    top_k: int
    warmup: int
    repetitions: int
    seed: int


@dataclass(frozen=True)
class Result:
    """One exchange of one size.

    Attributes:
        name: Of the collective, or of our dispatch.
        bytes_per_rank: Size S: of a rank's tensor in all_to_all and all_reduce, of a rank's shard in all_gather and
            reduce_scatter; in our dispatch, of the token copies.
        bytes_sent: What a rank has to send to others, at the least; equal to what it receives.
        seconds: Of the slowest rank.
        bytes_per_second: bytes_sent over the median.
    """

    name: str
    bytes_per_rank: int
    bytes_sent: float
    seconds: Spread
    bytes_per_second: float


@dataclass(frozen=True)
class Report:
    """What the benchmark found.

    Attributes:
        options: As asked.
        device_type: `cpu` or `cuda`.
        machine: Of rank 0.
        results: By collective and size.
    """

    options: Options
    device_type: str
    machine: Machine
    results: list[Result]


def run(options: Options) -> Report | None:
    """Measure every collective.

    Args:
        options: The command line.

    Returns:
        The report; None on ranks other than 0, where a launcher has started them.

    Raises:
        ConfigError: Too few GPUs, or fewer than two ranks.
    """
    if options.num_ranks < 2 and not launch_environment().launched:
        raise ConfigError(f"--nproc={options.num_ranks}: one rank exchanges nothing. Use 2 or more.")
    return measure_on_ranks(measure_collectives, options)


def measure_collectives(group: dist.ProcessGroup, device: torch.device, options: Options) -> Report:
    """Measure every collective in a started process group.

    Args:
        group: The world.
        device: This rank's.
        options: The command line.

    Returns:
        The report; times are the same on every rank.

    Collective: `group`; every rank must call.
    """
    sizes = options.megabytes or ((1, 16, 128, 256) if device.type == "cuda" else (1,))
    results = []
    for size in sizes:
        for name, (function, sent) in plain_collectives(size * MEGABYTE, group, device).items():
            results.append(_result(name, size * MEGABYTE, sent, function, group, device, options))
    results += our_dispatch(group, device, options)
    return Report(options, device.type, describe(device), results)


def plain_collectives(
    num_bytes: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, tuple[Callable[[], object], float]]:
    """Return the collectives on tensors of a size, in bf16, and the bytes that each rank has to send.

    Args:
        num_bytes: S, see `Result`.
        group: Its ranks.
        device: This rank's.

    Returns:
        The call and the bytes, by name: S·(n−1)/n for all_to_all, S·(n−1) for all_gather and reduce_scatter, and
        2·S·(n−1)/n for all_reduce, of n ranks.
    """
    ranks = group.size()
    count = num_bytes // 2 // ranks * ranks
    one = torch.zeros(count, dtype=torch.bfloat16, device=device)
    other = torch.zeros_like(one)
    all_of_them = torch.zeros(ranks * count, dtype=torch.bfloat16, device=device)
    size = 2.0 * count
    return {
        "all_to_all_single": (lambda: dist.all_to_all_single(other, one, group=group), size * (ranks - 1) / ranks),
        "all_gather_into_tensor": (
            lambda: dist.all_gather_into_tensor(all_of_them, one, group=group),
            size * (ranks - 1),
        ),
        "reduce_scatter_tensor": (
            lambda: dist.reduce_scatter_tensor(one, all_of_them, group=group),
            size * (ranks - 1),
        ),
        "all_reduce": (lambda: dist.all_reduce(one, group=group), 2 * size * (ranks - 1) / ranks),
    }


def our_dispatch(group: dist.ProcessGroup, device: torch.device, options: Options) -> list[Result]:
    """Measure our dispatch and combine, forward alone and with backward.

    Args:
        group: The expert-parallel group.
        device: This rank's.
        options: The command line.

    Returns:
        Both results.

    Collective: `group`; every rank must call.
    """
    on_cuda = device.type == "cuda"
    case = DispatchCase(
        ep=group.size(),
        num_tokens=options.tokens or (16384 if on_cuda else 512),
        hidden_size=options.hidden_size or (4096 if on_cuda else 128),
        num_experts=options.num_experts,
        top_k=options.top_k,
        dtypes=("bf16",),
        seed=options.seed,
    )
    dispatcher = AllToAllDispatcher(num_experts=case.num_experts, group=group)
    problem = make_problem(case, group.rank(), device).to(torch.bfloat16)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            sent = dispatcher.dispatch(problem.x_TD, problem.probs_TK, problem.experts_TK)
            return dispatcher.combine(sent.rows_RD, sent.handle)

    by_rank = [traffic["all_to_all"] for traffic in traffic_of_all_ranks(case, problem, "bf16", group)]
    one_way = sum(traffic.forward for traffic in by_rank) / len(by_rank)
    both = sum(traffic.total for traffic in by_rank) / len(by_rank)
    copies = case.num_tokens * case.top_k * case.hidden_size * 2
    return [
        _result(DISPATCH_FORWARD, copies, one_way, forward, group, device, options),
        _result(DISPATCH_BOTH, copies, both, lambda: exchange(dispatcher, problem), group, device, options),
    ]


def _result(
    name: str,
    num_bytes: int,
    sent: float,
    function: Callable[[], object],
    group: dist.ProcessGroup,
    device: torch.device,
    options: Options,
) -> Result:
    samples = interleave(
        {name: function},
        device,
        warmup=options.warmup,
        repetitions=options.repetitions,
        # Ranks that start together: else a rank's time holds its wait for the others.
        before_each=lambda: dist.barrier(group),
    )
    spread = Spread.of(slowest(samples[name], group, device))
    if group.rank() == 0:
        print(f"{name}, {num_bytes / MEGABYTE:g} MB: {spread.median * 1e3:.3f} ms", file=sys.stderr, flush=True)
    return Result(name, num_bytes, sent, spread, sent / spread.median)
