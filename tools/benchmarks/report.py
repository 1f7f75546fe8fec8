"""The results of `expert-block` as Markdown, as JSON, and as a bar chart."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moe_framework.errors import ConfigError, DependencyError
from tools.benchmarks.timing import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tools.benchmarks.expert_block import Report

BACKENDS = ("loop", "grouped_mm")
DISPATCHERS = ("all_gather", "all_to_all")
COLORS = ("#9aa0a6", "#1a73e8")


def check_outputs(json_file: Path | None, chart_file: Path | None) -> None:
    """Refuse, before anything is measured, files that could not be written afterwards.

    Args:
        json_file: From `--json`.
        chart_file: From `--chart`.

    Raises:
        ConfigError: A folder is missing.
        DependencyError: A chart is wanted and matplotlib is not installed.
    """
    violations = [
        f"{name}={file}: the folder {file.parent} does not exist. Create it, or choose another."
        for name, file in (("--json", json_file), ("--chart", chart_file))
        if file is not None and not file.parent.is_dir()
    ]
    if violations:
        raise ConfigError(violations)
    if chart_file is not None and find_spec("matplotlib") is None:
        raise DependencyError(
            f"--chart={chart_file} needs matplotlib, which is not installed. Install '.[test]' or leave --chart out."
        )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are padded to one width, numbers to the right.

    Args:
        header: Names of the columns.
        rows: Cells, as many in each row as in the header.
    """
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    rule = ["-" * (width - 1) + ":" for width in widths]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
        for cells in (header, rule, *rows)
    ]
    return "\n".join(lines)


def milliseconds(spread: Spread) -> str:
    """Return `median (lower quartile to upper quartile)` of seconds, in ms."""
    return with_quartiles(spread.scaled(1e3), digits=2 if spread.median < 0.01 else 1)


def with_quartiles(spread: Spread, digits: int = 2) -> str:
    """Return `median (lower quartile to upper quartile)` with that many digits after the point."""
    median, lower, upper = (
        f"{value:.{digits}f}" for value in (spread.median, spread.lower_quartile, spread.upper_quartile)
    )
    return f"{median} ({lower} to {upper})"


def to_markdown(report: "Report") -> str:
    """Return the report as Markdown; times are medians with quartiles."""
    options = report.options
    sizes = f"T={options.tokens}, D={options.hidden_size}, F={options.intermediate_size}, K={options.top_k}"
    parts = [
        f"## expert-block on {report.device_type}",
        f"{report.machine.sentence()}. {sizes}; {options.repetitions} interleaved repetitions, "
        "median (quartiles), forward and backward.",
    ]
    if report.experts:
        parts += ["### Experts: loop against grouped_mm, all on one rank", _experts_table(report)]
    if report.dispatch:
        title = f"### Dispatch and combine: all-gather against all-to-all, E={options.num_experts[0]}"
        parts += [title, _dispatch_table(report)]
    parts += [f"Skipped: {reason}" for reason in report.skipped]
    return "\n\n".join(parts)


def _experts_table(report: "Report") -> str:
    header = ["E", "dtype", "loop ms", "grouped_mm ms", "loop / grouped_mm", "loop GFLOP/s", "grouped_mm GFLOP/s"]
    rows = [
        [
            str(result.num_experts),
            result.dtype,
            milliseconds(result.seconds["loop"]),
            milliseconds(result.seconds["grouped_mm"]),
            with_quartiles(result.loop_over_grouped_mm),
            f"{result.gflop_per_s['loop']:.2f}",
            f"{result.gflop_per_s['grouped_mm']:.2f}",
        ]
        for result in report.experts
    ]
    return markdown_table(header, rows)


def _dispatch_table(report: "Report") -> str:
    header = ["ep", "dtype", "all-gather MB", "all-to-all MB", "ratio", "all-gather ms", "all-to-all ms", "time ratio"]
    rows = [
        [
            str(result.ep),
            result.dtype,
            f"{sum(result.bytes_sent['all_gather'].values()) / 1e6:.2f}",
            f"{sum(result.bytes_sent['all_to_all'].values()) / 1e6:.2f}",
            f"{result.all_gather_over_all_to_all_bytes:.2f}",
            milliseconds(result.seconds["all_gather"]),
            milliseconds(result.seconds["all_to_all"]),
            with_quartiles(result.all_gather_over_all_to_all_seconds),
        ]
        for result in report.dispatch
    ]
    return markdown_table(header, rows)


def write_json(report: "Report", file: Path) -> None:
    """Write the report with its fields' names; times in seconds, bytes in bytes."""
    file.write_text(json.dumps({"benchmark": "expert-block", **asdict(report)}, indent=2) + "\n", encoding="utf-8")


def write_chart(report: "Report", file: Path) -> None:
    """Draw time and traffic as bars, with the quartiles as whiskers; the format follows the file's suffix."""
    # Imported here: optional, and slow to import.
    from matplotlib.figure import Figure

    panels = _panels(report)
    figure = Figure(figsize=(4.4 * len(panels), 4.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _paired_bars(axes, panel)
    figure.suptitle(report.machine.sentence(), fontsize=9)
    figure.savefig(file, dpi=110)


class _Panel(NamedTuple):
    title: str
    unit: str
    labels: list[str]
    bars: dict[str, list[Spread]]


def _panels(report: "Report") -> list[_Panel]:
    """The panels that have results; in each, the baseline comes first."""
    panels = []
    if report.experts:
        times = {name: [result.seconds[name].scaled(1e3) for result in report.experts] for name in BACKENDS}
        labels = [f"E={result.num_experts}\n{result.dtype}" for result in report.experts]
        panels.append(_Panel("Experts: time", "ms", labels, times))
    if report.dispatch:
        labels = [f"ep={result.ep}\n{result.dtype}" for result in report.dispatch]
        times = {name: [result.seconds[name].scaled(1e3) for result in report.dispatch] for name in DISPATCHERS}
        megabytes = {
            name: [Spread.of([sum(result.bytes_sent[name].values()) / 1e6]) for result in report.dispatch]
            for name in DISPATCHERS
        }
        panels.append(_Panel("Dispatch and combine: sent per rank", "MB", labels, megabytes))
        panels.append(_Panel("Dispatch and combine: time", "ms", labels, times))
    return panels


def _paired_bars(axes: "Axes", panel: _Panel) -> None:
    """Draw a group of bars for each label."""
    width = 0.38
    for place, (name, values) in enumerate(panel.bars.items()):
        positions = [index + (place - 0.5) * width for index in range(len(panel.labels))]
        whiskers = [
            [value.median - value.lower_quartile for value in values],
            [value.upper_quartile - value.median for value in values],
        ]
        bars = axes.bar(
            positions,
            [value.median for value in values],
            width,
            yerr=whiskers if any(map(any, whiskers)) else None,
            color=COLORS[place],
            label=name,
            capsize=3,
        )
        axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.set(title=panel.title, ylabel=panel.unit)
    axes.set_xticks(range(len(panel.labels)), panel.labels)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(top=1.2 * axes.get_ylim()[1])
    axes.legend(frameon=False, loc="upper left", ncols=2)
