"""What `train-step` found at each number of ranks, as points of a curve: of this run, or of files of earlier ones."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_framework.errors import ConfigError
from tools.benchmarks.breakdown import ranges
from tools.benchmarks.timing import Spread

# What may differ between the points of one curve: what grows, what follows from it, and how the run is called.
GROWS = {
    "model": ("num_experts",),
    "parallel": ("dp", "dp_replicate", "ep"),
    "train": ("global_batch_size",),
    "run": None,
    "checkpoint": None,
}


@dataclass(frozen=True)
class Point:
    """One contender at one number of ranks.

    Attributes:
        contender: Such as `ours:bf16`.
        num_ranks: Ranks.
        ep: `parallel.ep`.
        num_experts: Of each layer.
        error: Why it has no numbers; None if it ran.
        seconds: Of a step.
        tokens_per_second_per_gpu: At the median.
        efficiency: That rate over the rate at the fewest ranks at which the contender ran.
        peak_bytes: See `train_step.measure.Row`.
        exchange_seconds: Of the token exchange's kernels in a step, waits included; None without a breakdown on GPUs.
        exchange_exposed_seconds: Of it, with no computation beside it.
        sharding_seconds: The same of FSDP's collectives.
        sharding_exposed_seconds: The same of FSDP's collectives.
    """

    contender: str
    num_ranks: int
    ep: int
    num_experts: int
    error: str | None
    seconds: Spread | None
    tokens_per_second_per_gpu: float | None
    efficiency: float | None
    peak_bytes: int | None
    exchange_seconds: float | None
    exchange_exposed_seconds: float | None
    sharding_seconds: float | None
    sharding_exposed_seconds: float | None


def read_results(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Read what `train-step --json` wrote, sorted by the number of ranks.

    Raises:
        ConfigError: A file that is missing or is something else, or files whose runs differ in more than their ranks.
    """
    results = []
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--from={file} cannot be read: {error}. Give a file of train-step --json.") from error
        if not isinstance(content, dict) or content.get("benchmark") != "train-step":
            raise ConfigError(f"--from={file} holds no result of train-step. Give a file of train-step --json.")
        results.append((content, file))
    results.sort(key=lambda pair: pair[0]["num_ranks"])
    first, first_file = results[0]
    for content, file in results[1:]:
        _check_comparable(first, first_file, content, file)
    return [content for content, _ in results]


def _check_comparable(first: dict[str, Any], first_file: Path, other: dict[str, Any], file: Path) -> None:
    if first["num_ranks"] == other["num_ranks"]:
        raise ConfigError(f"--from={file} has {other['num_ranks']} ranks, as has {first_file}. Give one file for each.")
    pairs = [("GPU", first["machine"]["gpu"], other["machine"]["gpu"])]
    for section, values in first["options"]["config"].items():
        free = GROWS.get(section, ())
        if free is not None and isinstance(values, Mapping):
            others = other["options"]["config"][section]
            pairs += [(f"{section}.{key}", value, others[key]) for key, value in values.items() if key not in free]
    differing = [f"{name} is {a} in {first_file} and {b} here" for name, a, b in pairs if a != b]
    if differing:
        raise ConfigError(
            [f"--from={file}: {text}. Measure the same work per rank at every size." for text in differing]
        )


def points_of(results: Iterable[dict[str, Any]]) -> list[Point]:
    """Turn results into points, contender by contender.

    Args:
        results: As `train-step --json` writes them, sorted by the number of ranks.
    """
    points: list[Point] = []
    base: dict[str, float] = {}
    for result in results:
        for row in result["rows"]:
            rate = row["tokens_per_second_per_gpu"]
            if rate is not None:
                base.setdefault(row["name"], rate)
            points.append(_point(result, row, base.get(row["name"])))
    order = list(dict.fromkeys(point.contender for point in points))
    return sorted(points, key=lambda point: (order.index(point.contender), point.num_ranks))


def _point(result: dict[str, Any], row: dict[str, Any], base: float | None) -> Point:
    config, rate = result["options"]["config"], row["tokens_per_second_per_gpu"]
    communication = {part["part"]: part for part in (row["breakdown"] or {}).get("communication", ())}
    seconds = {
        f"{name}_{key}": communication[part][key] if part in communication else None
        for name, part in (("exchange", ranges.EXCHANGE), ("sharding", ranges.SHARDING))
        for key in ("seconds", "exposed_seconds")
    }
    return Point(
        contender=row["name"],
        num_ranks=result["num_ranks"],
        ep=config["parallel"]["ep"],
        num_experts=config["model"]["num_experts"],
        error=row["error"],
        seconds=None if row["seconds"] is None else Spread(**row["seconds"]),
        tokens_per_second_per_gpu=rate,
        efficiency=None if rate is None or base is None else rate / base,
        peak_bytes=row["peak_bytes"],
        **seconds,
    )
