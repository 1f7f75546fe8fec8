"""The results of `collectives` as Markdown, as JSON, and as a chart."""

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from tools.benchmarks.collectives import MEGABYTE, Report
from tools.benchmarks.report import markdown_table, milliseconds


def to_markdown(report: Report) -> str:
    """Return the report as Markdown; times are medians with quartiles."""
    backend = "NCCL" if report.device_type == "cuda" else "gloo"
    rows = [
        [
            result.name,
            f"{result.bytes_per_rank / MEGABYTE:,.4g}",
            milliseconds(result.seconds),
            f"{result.bytes_sent / MEGABYTE:,.4g}",
            f"{result.bytes_per_second / 1e9:.4g}",
        ]
        for result in report.results
    ]
    return "\n\n".join(
        [
            f"## collectives over {report.options.num_ranks} ranks, {backend}",
            f"{report.machine.sentence()}. bf16; {report.options.repetitions} repetitions after a barrier, median "
            "(quartiles) of the slowest rank.",
            markdown_table(["exchange", "MB per rank", "ms", "MB sent", "GB/s per direction"], rows),
        ]
    )


def write_json(report: Report, file: Path) -> None:
    """Write the report with its fields' names; times in seconds, bytes in bytes."""
    file.write_text(json.dumps({"benchmark": "collectives", **asdict(report)}, indent=2) + "\n", encoding="utf-8")


def write_chart(report: Report, file: Path) -> None:
    """Draw GB/s by size, a line for each exchange; the format follows the file's suffix."""
    # Imported here: optional, and slow to import.
    from matplotlib.figure import Figure

    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for result in report.results:
        lines[result.name].append((result.bytes_per_rank / MEGABYTE, result.bytes_per_second / 1e9))
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set_xscale("log")
    axes.set(xlabel="MB per rank", ylabel="GB/s per direction")
    axes.set_ylim(bottom=0)
    axes.set_title(report.machine.sentence(), fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=110)
