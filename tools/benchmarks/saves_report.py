"""The results of `saves` as Markdown, as JSON, and as a chart."""

import json
from dataclasses import asdict
from pathlib import Path

from tools.benchmarks.report import COLORS, markdown_table, milliseconds, with_quartiles
from tools.benchmarks.saves import Report


def to_markdown(report: Report) -> str:
    """Return the report as Markdown; times are medians with quartiles."""
    options, beats = report.options, report.heartbeat
    rows = [
        [
            way,
            milliseconds(save.stall),
            milliseconds(save.staging),
            with_quartiles(save.stall_over_step.scaled(100.0), digits=1),
            milliseconds(save.published),
            f"{save.steps_meanwhile:.0f}",
            "" if save.step_meanwhile is None else milliseconds(save.step_meanwhile),
            milliseconds(save.cost),
        ]
        for way, save in report.saves.items()
    ]
    header = [
        "save",
        "stall ms",
        "of it staging ms",
        "stall, % of a step",
        "published after ms",
        "steps meanwhile",
        "such a step ms",
        "cost to training ms",
    ]
    monitor = "with ft_launcher's monitor" if beats.has_monitor else "without a monitor"
    return "\n\n".join(
        [
            f"## saves of {options.config_name} on {options.num_ranks} ranks of {report.device_type}",
            f"{report.machine.sentence()}. {report.num_parameters:,} parameters, "
            f"{report.step_bytes / 1e6:.1f} MB a saved step; {options.repetitions} repetitions of both ways in turn, "
            "median (quartiles) of the slowest rank.",
            f"A training step without a save takes {milliseconds(report.step)} ms. The stall in the foreground is "
            f"{with_quartiles(report.stall_ratio, digits=1)} times that in the background.",
            markdown_table(header, rows),
            f"Heartbeat, {monitor}: {1e6 * beats.mean:.2f} µs a step, {100 * beats.share_of_step:.5f} % of it; "
            f"the longest of {beats.calls} calls {1e6 * beats.longest:.1f} µs.",
        ]
    )


def write_json(report: Report, file: Path) -> None:
    """Write the report with its fields' names; times in seconds, bytes in bytes."""
    body = {"benchmark": "saves", **asdict(report)}
    file.write_text(json.dumps(body, indent=2, default=str) + "\n", encoding="utf-8")


def write_chart(report: Report, file: Path) -> None:
    """Draw stall and cost of both ways, with the quartiles as whiskers; the format follows the file's suffix."""
    # Imported here: optional, and slow to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, (way, save) in enumerate(report.saves.items()):
        values = [spread.scaled(1e3) for spread in (save.stall, save.cost)]
        bars = axes.bar(
            [index + (place - 0.5) * 0.38 for index in range(len(values))],
            [value.median for value in values],
            0.38,
            yerr=[
                [value.median - value.lower_quartile for value in values],
                [value.upper_quartile - value.median for value in values],
            ],
            color=COLORS[1 - place],
            label=f"in the {way}",
            capsize=3,
        )
        axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.set_xticks(range(2), ["stall", "cost to training"])
    axes.set(title=f"A save of {report.options.config_name}", ylabel="ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)
