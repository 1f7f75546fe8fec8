"""The results of `expert-block --shape` as Markdown, as JSON, and as a bar chart."""

import json
import textwrap
from dataclasses import asdict
from pathlib import Path

from tools.benchmarks.breakdown.report import ceilings_text
from tools.benchmarks.expert_rates import RatesReport, RatesRow
from tools.benchmarks.report import COLORS, markdown_table, milliseconds


def to_markdown(report: RatesReport) -> str:
    """Return the report as Markdown; times are medians with quartiles."""
    header = ["contender", "ms", "TFLOP/s", "of the dense rate", "difference from loop", "notes"]
    parts = [
        f"## expert-block by backend on {report.device_type}",
        f"{report.machine.sentence()}. Forward and backward, random routing, {report.options.repetitions} "
        "repetitions, median (quartiles); each contender alone, one after the other.",
        f"Dense rates before: {ceilings_text(report.before)}; after: {ceilings_text(report.after)}. The higher counts.",
    ]
    for shape, case in report.options.cases.items():
        rows = [_cells(row) for row in report.rows if row.shape == shape]
        sizes = f"D={case.hidden_size}, F={case.intermediate_size}, E={case.num_experts}, K={case.top_k}"
        parts += [f"### {shape}: T={case.num_tokens}, {sizes}", markdown_table(header, rows)]
    return "\n\n".join(parts)


def _cells(row: RatesRow) -> list[str]:
    note = "peer: own weights, rows padded beforehand" if row.is_peer else ""
    if row.seconds is None or row.flops is None:
        return [row.contender, "failed", "–", "–", "–", (row.error or "").replace("|", "\\|")]
    return [
        row.contender,
        milliseconds(row.seconds),
        f"{row.flops / 1e12:.4g}",
        "–" if row.share_of_dense is None else f"{row.share_of_dense:.3f}",
        "–" if row.output_difference is None else f"{row.output_difference:.2g}",
        note,
    ]


def write_json(report: RatesReport, file: Path) -> None:
    """Write the report with its fields' names; times in seconds."""
    content = {"benchmark": "expert-block-rates", **asdict(report)}
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_chart(report: RatesReport, file: Path) -> None:
    """Draw TFLOP/s as horizontal bars, a panel for each shape, with the dense rates as lines."""
    # Imported here: optional, and slow to import.
    from matplotlib.figure import Figure

    shapes = list(report.options.cases)
    most = max(len([row for row in report.rows if row.shape == shape and row.flops]) for shape in shapes)
    figure = Figure(figsize=(5.5 * len(shapes), 1.4 + 0.32 * max(most, 1)), layout="constrained")
    dense = {"bf16": max(report.before.bf16_flops, report.after.bf16_flops), "FP8": report.before.fp8_flops}
    for axes, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        rows = [row for row in report.rows if row.shape == shape and row.flops is not None][::-1]
        bars = axes.barh(
            range(len(rows)),  # a contender may be there twice
            [(row.flops or 0.0) / 1e12 for row in rows],
            tick_label=[row.contender for row in rows],
            color=[COLORS[0] if row.is_peer else COLORS[1] for row in rows],
        )
        axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=3)
        for (name, rate), style in zip(dense.items(), ("--", ":"), strict=True):
            if rate:
                axes.axvline(rate / 1e12, linestyle=style, color="#444444", linewidth=1, label=f"dense {name}")
        axes.set(title=shape, xlabel="TFLOP/s")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=2)
    figure.suptitle(textwrap.fill(report.machine.sentence(), 75 * len(shapes)), fontsize=8)
    figure.savefig(file, dpi=110)
