"""The `--shape` part of `expert-block`: every backend and Transformer Engine alone, against the dense rates."""

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from moe_framework.distributed.runtime import resolve_device
from moe_framework.errors import ConfigError
from moe_framework.moe.experts.choose import BACKENDS, SCALED_MM_MODE, ExpertShape, make_backend
from moe_framework.moe.experts.loop import loop_experts
from moe_framework.precision.modes import MODES
from moe_framework.precision.policy import precision_policy
from tools.benchmarks.ceilings import Ceilings, measure_ceilings
from tools.benchmarks.experts import ExpertsCase, ExpertsProblem, forward_backward, make_problem, relative_difference
from tools.benchmarks.machine import Machine, describe
from tools.benchmarks.te_peers import KINDS, te_peer
from tools.benchmarks.timing import Spread, elapsed

CONTENDERS = (
    *(f"{name}:bf16" for name in BACKENDS),
    f"scaled_mm:{SCALED_MM_MODE}",
    *(f"te:{mode}" for mode in ("bf16", "fp8_current", "fp8_delayed", "fp8_block")),
    *(f"te.ops:{mode}" for mode in ("bf16", "fp8_current", "fp8_delayed")),
    *(f"te.GroupedLinear:{mode}" for mode in ("bf16", "fp8_current", "fp8_block")),
)
MAX_ERROR_LENGTH = 300


@dataclass(frozen=True)
class RatesOptions:
    """What the command line asks for.

    Attributes:
        device: `auto`, `cpu` or `cuda`.
        cases: Sizes by name, in bf16.
        contenders: `NAME:MODE`: a backend of ours, or a peer of `te_peers`.
        warmup: Repetitions that are not kept.
        repetitions: Repetitions that are.
    """

    device: str
    cases: dict[str, ExpertsCase]
    contenders: tuple[str, ...]
    warmup: int
    repetitions: int


@dataclass(frozen=True)
class RatesRow:
    """What one contender did.

    Attributes:
        shape: Name of the case.
        contender: `NAME:MODE`.
        is_peer: Whether it is Transformer Engine alone, with rows that were padded beforehand.
        error: Why it has no numbers; None if it ran.
        seconds: Of one forward and backward.
        flops: FLOP/s of the case's rows; padding is not counted.
        share_of_dense: Of the dense rate of its format, 0 to 1.
        output_difference: ‖out − loop's out‖ / ‖loop's out‖ in bf16; None for peers, whose weights are others.
    """

    shape: str
    contender: str
    is_peer: bool
    error: str | None = None
    seconds: Spread | None = None
    flops: float | None = None
    share_of_dense: float | None = None
    output_difference: float | None = None


@dataclass(frozen=True)
class RatesReport:
    """What the benchmark found.

    Attributes:
        options: As asked.
        device_type: `cpu` or `cuda`.
        machine: Where it ran.
        before: Ceilings before the first contender.
        after: Ceilings after the last; of both the higher counts.
        rows: By shape and contender.
    """

    options: RatesOptions
    device_type: str
    machine: Machine
    before: Ceilings
    after: Ceilings
    rows: list[RatesRow]


def run(options: RatesOptions) -> RatesReport:
    """Time every contender at every shape, one after the other.

    Args:
        options: The command line.

    Returns:
        The report.

    Raises:
        ConfigError: A contender that does not exist, or no GPU where one is asked for.
    """
    _check_contenders(options.contenders)
    device = resolve_device(options.device, local_rank=0)
    machine, before, rows = describe(device), measure_ceilings(device), []
    for shape, case in options.cases.items():
        problem = make_problem(case, device)
        with torch.no_grad():
            expected_RD = loop_experts(*problem[:-1])
        for contender in options.contenders:
            row = _measure(shape, contender, case, problem, expected_RD, options)
            took = row.error if row.seconds is None else f"{row.seconds.median * 1e3:.2f} ms"
            print(f"{shape} {contender}: {took}", file=sys.stderr, flush=True)
            rows.append(row)
        del problem, expected_RD
    after = measure_ceilings(device)
    rows = [_with_share(row, before, after) for row in rows]
    return RatesReport(options, device.type, machine, before, after, rows)


def _check_contenders(contenders: tuple[str, ...]) -> None:
    known = {*BACKENDS, "scaled_mm", "te", *KINDS}
    violations = []
    for contender in contenders:
        name, _, mode = contender.partition(":")
        if name not in known or mode not in MODES:
            violations.append(
                f"--contenders={contender} must be NAME:MODE with a name of {', '.join(sorted(known))} and a mode of "
                f"{', '.join(MODES)}."
            )
    if violations:
        raise ConfigError(violations)


def _measure(
    shape: str, contender: str, case: ExpertsCase, problem: ExpertsProblem, expected_RD: Tensor, options: RatesOptions
) -> RatesRow:
    name, _, mode = contender.partition(":")
    device = problem.rows_RD.device
    row = RatesRow(shape, contender, is_peer=name in KINDS)
    try:
        if row.is_peer:
            if device.type != "cuda":
                raise ConfigError(f"{contender} needs a CUDA device.")
            function, difference = te_peer(name, mode, case, problem.tokens_per_expert), None
        else:
            function, difference = _ours(name, mode, case, problem, expected_RD)
        seconds = _time(function, device, options)
    except Exception as error:
        return replace(row, error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_ERROR_LENGTH])
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return replace(row, seconds=seconds, flops=case.flop / seconds.median, output_difference=difference)


def _ours(
    name: str, mode: str, case: ExpertsCase, problem: ExpertsProblem, expected_RD: Tensor
) -> tuple[Callable[[], object], float]:
    device = problem.rows_RD.device
    if name not in BACKENDS and device.type != "cuda":
        raise ConfigError(f"experts.backend={name} needs a CUDA device.")
    shape = ExpertShape(case.num_experts, case.hidden_size, case.intermediate_size, problem.rows_RD.shape[0])
    backend = make_backend(name, shape, precision_policy(mode, device))
    out_RD, *_ = forward_backward(backend, problem)
    return partial(forward_backward, backend, problem), relative_difference(out_RD, expected_RD)


def _time(function: Callable[[], object], device: torch.device, options: RatesOptions) -> Spread:
    for _ in range(options.warmup):
        function()
    return Spread.of([elapsed(function, device) for _ in range(options.repetitions)])


def _with_share(row: RatesRow, before: Ceilings, after: Ceilings) -> RatesRow:
    if row.flops is None:
        return row
    if row.contender.endswith(":bf16"):
        return replace(row, share_of_dense=row.flops / max(before.bf16_flops, after.bf16_flops))
    dense = max(before.fp8_flops or 0.0, after.fp8_flops or 0.0)
    return replace(row, share_of_dense=row.flops / dense) if dense else row
