"""The run of `train-step`: starts the ranks, then one contender after the other in their one process group."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.observe.throughput import flops_per_token
from moe_framework.train.build import mesh_of
from tools.benchmarks.breakdown.measure import Breakdown, measure_breakdown
from tools.benchmarks.ceilings import Ceilings, measure_ceilings
from tools.benchmarks.machine import Machine, describe
from tools.benchmarks.ranks import measure_on_ranks
from tools.benchmarks.train_step.contender import Contender, active_parameters
from tools.benchmarks.train_step.hugging_face import build_hugging_face
from tools.benchmarks.train_step.measure import Row, measure
from tools.benchmarks.train_step.megatron import build_megatron
from tools.benchmarks.train_step.options import Options
from tools.benchmarks.train_step.ours import build_ours
from tools.benchmarks.train_step.report import write_json

PACKAGES = ("torch", "triton", "transformers", "megatron-core", "transformer-engine", "moe_framework")
RATIO_PEERS = ("hf_eager", "hf_grouped_mm", "megatron_bf16", "megatron_fp8")


@dataclass(frozen=True)
class Report:
    """What the benchmark found.

    Attributes:
        options: As asked, with the configuration.
        device_type: `cpu` or `cuda`.
        machine: Of rank 0.
        versions: Of the packages that are installed.
        num_ranks: Ranks.
        tokens_per_step: Of all ranks together, for ours and for the peers alike unless tp > 1.
        flops_per_token: Forward and backward of the model.
        ceilings: Rates measured on this device in the same run; None without `--breakdown`.
        rows: One for each contender, in the order in which they ran.
    """

    options: Options
    device_type: str
    machine: Machine
    versions: dict[str, str]
    num_ranks: int
    tokens_per_step: int
    flops_per_token: float
    ceilings: Ceilings | None
    rows: list[Row]


def run(options: Options) -> Report | None:
    """Measure every contender.

    Args:
        options: From `resolve`.

    Returns:
        The report; None on ranks other than 0, where a launcher has started them.

    Raises:
        ConfigError: Too few GPUs.
        ProcessRaisedException: A rank raised outside a contender.
    """
    return measure_on_ranks(measure_contenders, options)


def measure_contenders(group: dist.ProcessGroup, device: torch.device, options: Options) -> Report:
    """Measure one contender after the other in a started process group.

    Args:
        group: The world.
        device: This rank's.
        options: From `resolve`.

    Returns:
        The report, the same on every rank but for the description of its machine.

    Collective: `group`; every rank must call.
    """
    config, sizes, num_ranks = options.config, options.config.model, group.size()
    mesh = mesh_of(config, device.type)
    length = config.data.seq_length
    report = Report(
        options=options,
        device_type=device.type,
        machine=describe(device),
        versions=installed_versions(),
        num_ranks=num_ranks,
        tokens_per_step=config.train.global_batch_size * length,
        flops_per_token=flops_per_token(
            active_parameters(sizes), sizes.num_layers, sizes.num_heads, sizes.resolved_head_dim, length
        ),
        ceilings=measure_ceilings(device) if options.breakdown else None,
        rows=[],
    )
    for name in options.contenders:
        ours = name.startswith("ours:")
        tokens = report.tokens_per_step / num_ranks if ours else config.train.micro_batch_size * length
        row = measure(
            name,
            _builder(name, options, mesh, device, group.rank()),
            device,
            warmup=options.warmup,
            repetitions=options.repetitions,
            tokens_per_gpu=tokens,
            flops_per_token=report.flops_per_token,
            profile=_profiler(name, options, device, report.ceilings) if ours else None,
        )
        report.rows.append(row)
        if group.rank() == 0:
            print(_line(row), file=sys.stderr, flush=True)
            if options.partial_file is not None:
                write_json(replace(report, rows=with_ratios(report.rows)), options.partial_file)
    return replace(report, rows=with_ratios(report.rows))


def _builder(
    name: str, options: Options, mesh: ParallelMesh, device: torch.device, rank: int
) -> Callable[[], Contender]:
    kind, _, mode = name.partition(":")
    seed = options.seed
    if kind == "ours":
        return partial(build_ours, options.config_for(mode), mesh, device, seed=seed)
    if kind.startswith("hf_"):
        experts = kind.removeprefix("hf_")
        clip = options.peer_clipping
        return partial(
            build_hugging_face, options.config, device, experts=experts, seed=seed, data_rank=rank, clip=clip
        )
    return partial(build_megatron, options.config, device, fp8=kind == "megatron_fp8", seed=seed, data_rank=rank)


def _profiler(
    name: str, options: Options, device: torch.device, ceilings: Ceilings | None
) -> Callable[[Contender], Breakdown] | None:
    if ceilings is None:
        return None
    config = options.config_for(name.removeprefix("ours:"))
    return lambda contender: measure_breakdown(contender.step, contender.profiled, config, device, ceilings)


def with_ratios(rows: list[Row]) -> list[Row]:
    """Return the rows with the ratio of their rate to that of each peer that ran."""
    rates = {row.name: row.tokens_per_second_per_gpu for row in rows}
    peers = {name: rate for name in RATIO_PEERS if (rate := rates.get(name)) is not None}
    return [
        row if (own := row.tokens_per_second_per_gpu) is None else replace(row, ratios=_over(own, peers))
        for row in rows
    ]


def _over(own: float, peers: dict[str, float]) -> dict[str, float]:
    return {name: own / rate for name, rate in peers.items()}


def _line(row: Row) -> str:
    if row.seconds is None:
        return f"{row.name}: {row.error}"
    return f"{row.name}: {row.seconds.median * 1e3:.1f} ms, {row.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that take part, and of CUDA and NCCL where there is a GPU."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        from torch.cuda import nccl

        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["nccl"] = ".".join(map(str, nccl.version()))
    return found
