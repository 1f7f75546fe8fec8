"""The results of `scaling` as Markdown, as JSON, and as curves."""

import json
from dataclasses import asdict
from pathlib import Path

from tools.benchmarks.report import markdown_table, milliseconds
from tools.benchmarks.scaling.points import Point
from tools.benchmarks.scaling.run import Scaling

HEADER = (
    "contender",
    "ranks",
    "ep",
    "experts",
    "ms/step",
    "tokens/s per GPU",
    "efficiency",
    "token exchange ms",
    "hidden",
    "FSDP's collectives ms",
    "hidden",
    "peak GB",
)


def to_markdown(found: Scaling) -> str:
    """Return the curve as Markdown; times are medians with quartiles."""
    first = found.results[0]
    options, config = first["options"], first["options"]["config"]
    sizes = config["model"]
    machine = first["machine"]["gpu"] or f"ranks on {first['machine']['cpu']}"
    parts = [
        f"## scaling on {machine}",
        f"Weak scaling, `{options['config_name']}`: {found.growth}. {sizes['num_layers']} layers, "
        f"D={sizes['hidden_size']}, F={sizes['intermediate_size']}, K={sizes['top_k']}, V={sizes['vocab_size']}; "
        f"{config['train']['micro_batch_size']} × {config['data']['seq_length']} random tokens per rank; forward, "
        f"backward, AdamW. {options['warmup']} steps of warm-up, then {options['repetitions']} measured: median "
        "(quartiles) of the slowest rank. Efficiency is tokens/s per GPU over that of the fewest ranks.",
        markdown_table(HEADER, [_cells(point) for point in found.points]),
        *([_control_text(found)] if found.control else []),
        *(f"{p.contender} on {p.num_ranks} ranks: {p.error}" for p in found.points if p.error is not None),
    ]
    return "\n\n".join(parts)


def _cells(point: Point) -> list[str]:
    sizes = [point.contender, str(point.num_ranks), str(point.ep), str(point.num_experts)]
    if point.seconds is None:
        return [*sizes, "failed", *(["–"] * (len(HEADER) - len(sizes) - 1))]
    return [
        *sizes,
        milliseconds(point.seconds),
        f"{point.tokens_per_second_per_gpu:,.0f}",
        f"{point.efficiency:.3f}",
        *_collectives(point.exchange_seconds, point.exchange_exposed_seconds),
        *_collectives(point.sharding_seconds, point.sharding_exposed_seconds),
        "–" if point.peak_bytes is None else f"{point.peak_bytes / 1e9:.1f}",
    ]


def _collectives(seconds: float | None, exposed: float | None) -> list[str]:
    if not seconds or exposed is None:
        return ["–", "–"]
    return [f"{seconds * 1e3:.2f}", f"{max(0.0, 1 - exposed / seconds):.0%}"]


def _control_text(found: Scaling) -> str:
    first = {point.contender: point for point in found.points if point.num_ranks == found.control[0].num_ranks}
    texts = [
        f"{again.contender} {again.tokens_per_second_per_gpu / rate:.3f}"
        for again in found.control
        if (rate := first[again.contender].tokens_per_second_per_gpu) and again.tokens_per_second_per_gpu
    ]
    ranks = found.control[0].num_ranks
    return f"Control: {ranks} rank(s) measured again after all others, over the first time: {', '.join(texts) or '–'}."


def write_json(found: Scaling, file: Path) -> None:
    """Write points and the whole results of `train-step`; times in seconds, bytes in bytes."""
    file.write_text(json.dumps({"benchmark": "scaling", **asdict(found)}, indent=2) + "\n", encoding="utf-8")


def write_chart(found: Scaling, file: Path) -> None:
    """Draw the efficiency of each contender over the number of ranks; the format follows the file's suffix."""
    # Imported here: optional, and slow to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    ranks = sorted({point.num_ranks for point in found.points})
    axes.axhline(1.0, color="#9aa0a6", linewidth=1, linestyle="--")
    for name in dict.fromkeys(point.contender for point in found.points):
        own = [point for point in found.points if point.contender == name and point.efficiency is not None]
        axes.plot([p.num_ranks for p in own], [p.efficiency or 0.0 for p in own], marker="o", label=name)
        for point in own:
            axes.annotate(
                f"{point.efficiency:.2f}",
                (point.num_ranks, point.efficiency or 0.0),
                textcoords="offset points",
                xytext=(0, 7),
                ha="center",
                fontsize=8,
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(number) for number in ranks])
    axes.set(xlabel="ranks", ylabel="tokens/s per GPU over the fewest ranks'")
    axes.set_ylim(0.0, 1.15)
    axes.set_title(f"Weak scaling: {found.growth}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)
