"""The run of `scaling`: `train-step` at one number of ranks after the other, and at the smallest once more."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_framework.observe.progress import format_duration
from tools.benchmarks.scaling.points import Point, points_of, read_results
from tools.benchmarks.train_step import session
from tools.benchmarks.train_step.options import Options
from tools.benchmarks.train_step.report import to_json


@dataclass(frozen=True)
class Scaling:
    """What the benchmark found.

    Attributes:
        growth: What a larger number of ranks meant, in words.
        points: Contender by contender, by the number of ranks.
        control: The smallest number of ranks again, after all others: how far the machine drifted meanwhile. Empty
            while the run goes on, and for results from files.
        results: Of `train-step` at each number of ranks, as its JSON has them.
    """

    growth: str
    points: list[Point]
    control: list[Point]
    results: list[dict[str, Any]]


def measure(options: Sequence[Options], growth: str, keep: Callable[[Scaling], None]) -> Scaling:
    """Measure every number of ranks, each in ranks of its own.

    Args:
        options: From `sizes.plan`, the smallest number of ranks first.
        growth: What grows, in words.
        keep: Called with what there is after each, so that a run that dies leaves its points.

    Returns:
        The curve.

    Raises:
        ConfigError: Too few GPUs.
        ProcessRaisedException: A rank raised outside a contender.
    """
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    for number, size in enumerate((*options, options[0])):
        left = (time.monotonic() - began) / number * (len(options) + 1 - number) if number else None
        _say(size, number, len(options) + 1, left)
        results.append(_measured(size))
        if number < len(options):
            keep(Scaling(growth, points_of(results), [], results))
    control = points_of([results.pop()])
    found = Scaling(growth, points_of(results), control, results)
    keep(found)
    return found


def from_files(files: Sequence[Path]) -> Scaling:
    """Put results of separate runs of `train-step` together.

    Raises:
        ConfigError: See `read_results`.
    """
    results = read_results(files)
    return Scaling("from separate runs", points_of(results), [], results)


def _say(options: Options, number: int, total: int, left_s: float | None) -> None:
    left = "" if left_s is None else f", about {format_duration(left_s)} left"
    text = f"scaling {number + 1}/{total}: {options.num_ranks} ranks, {options.config.model.num_experts} experts{left}"
    print(text, file=sys.stderr, flush=True)


def _measured(options: Options) -> dict[str, Any]:
    report = session.run(options)
    assert report is not None, "no launcher has started this process"
    return json.loads(json.dumps(to_json(report), default=str))
