"""The results of `train-step` as Markdown, as JSON, and as a bar chart."""

import json
from collections.abc import Container
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tools.benchmarks.breakdown.report import breakdown_markdown
from tools.benchmarks.report import markdown_table, milliseconds
from tools.benchmarks.train_step.measure import Row
from tools.benchmarks.train_step.options import BASE

if TYPE_CHECKING:
    from tools.benchmarks.train_step.session import Report

OURS_COLOR, PEER_COLOR, PUBLISHED_COLOR = "#1a73e8", "#9aa0a6", "#f4b400"


def to_markdown(report: "Report") -> str:
    """Return the report as Markdown; times are medians with quartiles."""
    options, config = report.options, report.options.config
    command = " ".join([f"--config-name {options.config_name}", *options.overrides])
    sizes = config.model
    parts = [
        f"## train-step on {report.num_ranks} × {report.machine.gpu or 'CPU rank'}",
        f"{report.machine.sentence()}. `{command}`",
        f"{sizes.num_layers} layers, D={sizes.hidden_size}, F={sizes.intermediate_size}, E={sizes.num_experts}, "
        f"K={sizes.top_k}, V={sizes.vocab_size}; {config.train.micro_batch_size} × {config.data.seq_length} random "
        f"tokens per rank, the same in each step and for each contender; forward, backward, AdamW. "
        f"{options.warmup} steps of warm-up, then {options.repetitions} measured: median (quartiles) of the slowest "
        f"rank. Order of the run: {', '.join(options.contenders)}. Seed {options.seed}.",
        _table(report),
        _differences(report.rows),
    ]
    if options.published:
        ratios = "; ".join(f"{name} {ratio:.2f}" for name, ratio in options.published)
        parts.append(f"Published elsewhere, as ratios to {BASE} there: {ratios}.")
    if report.ceilings is not None:
        parts += [breakdown_markdown(row.name, row.breakdown, report.ceilings) for row in report.rows if row.breakdown]
    return "\n\n".join(parts)


def _table(report: "Report") -> str:
    peers = list(dict.fromkeys(name for row in report.rows for name in row.ratios))
    header = ["contender", "precision", "ms/step", "tokens/s per GPU", "model TFLOP/s"]
    header += [f"/ {name}" for name in peers] + ["peak GB", "loss first → last", "parameters"]
    return markdown_table(header, [_cells(row, peers) for row in report.rows])


def _cells(row: Row, peers: list[str]) -> list[str]:
    precision = row.facts.precision if row.facts else "–"
    if row.seconds is None:
        return [row.name, precision, "failed", *(["–"] * (2 + len(peers) + 3))]
    return [
        row.name,
        precision,
        milliseconds(row.seconds),
        f"{row.tokens_per_second_per_gpu:,.0f}",
        f"{(row.model_flops_per_second_per_gpu or 0.0) / 1e12:,.3g}",
        *(f"{row.ratios[name]:.2f}" if name in row.ratios else "–" for name in peers),
        "–" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.1f}",
        f"{row.first_loss:.3f} → {row.last_loss:.3f}",
        f"{row.num_parameters:,}",
    ]


def _differences(rows: list[Row]) -> str:
    header = ["contender", "master weights", "clipping", "AdamW's moments", "favours", "notes"]
    cells = [
        [
            row.name,
            row.facts.master_weights if row.facts else "–",
            ("yes" if row.facts.clipping else "no") if row.facts else "–",
            row.facts.optimizer_states if row.facts else "–",
            (row.facts.favours or "–") if row.facts else "–",
            "; ".join(
                text for text in (row.facts.notes if row.facts else "", row.error and f"error: {row.error}") if text
            ).replace("|", "\\|"),
        ]
        for row in rows
    ]
    return markdown_table(header, cells)


def to_json(report: "Report") -> dict:
    """Return the report with its fields' names; times in seconds, bytes in bytes."""
    return {"benchmark": "train-step", "order": list(report.options.contenders), **asdict(report)}


def write_json(report: "Report", file: Path) -> None:
    """Write the report as JSON."""
    file.write_text(json.dumps(to_json(report), indent=2, default=str) + "\n", encoding="utf-8")


def write_chart(report: "Report", file: Path) -> None:
    """Draw tokens/s per GPU as horizontal bars, and below them ratios where some were published.

    The format follows the file's suffix.
    """
    # Imported here: optional, and slow to import.
    from matplotlib.figure import Figure

    ran = {row.name: row for row in report.rows if row.tokens_per_second_per_gpu is not None}
    panels = [
        ("tokens/s per GPU", {name: row.tokens_per_second_per_gpu or 0.0 for name, row in ran.items()}, "{:,.0f}")
    ]
    if report.options.published:
        ratios = {name: row.ratios[BASE] for name, row in ran.items() if BASE in row.ratios}
        panels.append((f"tokens/s over {BASE}'s", ratios | dict(report.options.published), "{:.2f}"))
    heights = [0.6 + 0.45 * max(len(values), 1) for _, values, _ in panels]
    figure = Figure(figsize=(7.0, 0.6 + sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (label, values, digits) in zip(all_axes, panels, strict=True):
        names = list(values)[::-1]
        bars = axes.barh(names, [values[name] for name in names], color=[_color(name, ran) for name in names])
        axes.bar_label(bars, fmt=digits, fontsize=8, padding=3)
        axes.set(xlabel=label)
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_title(
        f"{report.options.config_name}, {report.options.config.model.num_layers} layers, "
        f"{report.num_ranks} × {report.machine.gpu or 'CPU rank'}",
        fontsize=9,
    )
    figure.savefig(file, dpi=110)


def _color(name: str, ran: Container[str]) -> str:
    if name not in ran:
        return PUBLISHED_COLOR
    return OURS_COLOR if name.startswith("ours") else PEER_COLOR
