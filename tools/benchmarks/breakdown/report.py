"""A breakdown as Markdown."""

from tools.benchmarks.breakdown.measure import Breakdown, Kernel, Part
from tools.benchmarks.ceilings import Ceilings
from tools.benchmarks.report import markdown_table

SHORT_NAME, SHORT_LIST, SHORT_WAITS = 90, 12, 6


def breakdown_markdown(name: str, found: Breakdown, ceilings: Ceilings) -> str:
    """Return the tables of one contender.

    Args:
        name: The contender's.
        found: Its breakdown.
        ceilings: That the floors are from.
    """
    idle = ["nothing running", *_time(found.idle_seconds, found.step_seconds), "", "", "", "", ""]
    whole = ["step, profiled", *_time(found.step_seconds, found.step_seconds), "", "", "", "", ""]
    header = ["part", "ms", "share", "ms of its kernels", "work", "rate", "floor ms", "floor / ms"]
    return "\n\n".join(
        [
            f"### Where the time of {name} goes (rank 0, mean of {found.steps} profiled steps)",
            markdown_table(header, [*map(_row, found.parts), idle, whole]),
            f"Ceilings of this run: {ceilings_text(ceilings)}.",
            *([communication_text(found)] if found.communication else []),
            *([waits_text(found)] if found.waits else []),
            markdown_table(
                ["ms/step", "calls/step", "part", "kernel"], [_kernel(k) for k in found.top_kernels[:SHORT_LIST]]
            ),
        ]
    )


def ceilings_text(ceilings: Ceilings) -> str:
    """Return the measured limits in words."""
    size = ceilings.matrix_size
    texts = [f"bf16 product {size}³ {ceilings.bf16_flops / 1e12:.4g} TFLOP/s"]
    if ceilings.fp8_flops is not None:
        texts.append(f"FP8 product {size}³ {ceilings.fp8_flops / 1e12:.4g} TFLOP/s")
    texts.append(f"copy {ceilings.copy_bytes / 1e12:.3g} TB/s")
    if ceilings.exchange_bytes is not None:
        texts.append(f"all-to-all {ceilings.exchange_bytes / 1e9:.3g} GB/s sent per rank")
    return ", ".join(texts)


def communication_text(found: Breakdown) -> str:
    """Return how long each part's collectives took, and how much of it computation hid."""
    texts = [f"{part.part} {part.seconds * 1e3:.2f} ms, {part.hidden:.0%} hidden" for part in found.communication]
    return f"Communication (its kernels, waits for slower ranks included): {'; '.join(texts)}."


def waits_text(found: Breakdown) -> str:
    """Return what came after the longest times in which nothing ran."""
    texts = []
    for wait in found.waits[:SHORT_WAITS]:
        until = f"{_short(wait.name)} of {wait.part}" if wait.name else "the end of the steps"
        texts.append(f"{wait.seconds * 1e3:.2f} ms until {until}")
    return f"Nothing ran, per step: {'; '.join(texts)}."


def _time(seconds: float, whole: float) -> list[str]:
    return [f"{seconds * 1e3:.2f}", f"{seconds / whole:.1%}"]


def _row(part: Part) -> list[str]:
    texts = [part.name, f"{part.seconds * 1e3:.2f}", f"{part.share:.1%}", f"{part.busy_seconds * 1e3:.2f}"]
    if part.work is None:
        return [*texts, "–", "–", "–", "–"]
    scale, unit = (1e12, "TFLOP") if part.work.unit == "FLOP" else (1e9, part.work.unit.replace("bytes", "GB"))
    rate_scale, rate_unit = (1e12, "TFLOP/s") if part.work.unit == "FLOP" else (1e12, "TB/s")
    return [
        *texts,
        f"{part.work.amount / scale:,.3g} {unit}",
        "–" if part.rate is None else f"{part.rate / rate_scale:,.3g} {rate_unit}",
        "–" if part.floor_seconds is None else f"{part.floor_seconds * 1e3:.2f}",
        "–" if part.floor_over_time is None else f"{part.floor_over_time:.2f}",
    ]


def _kernel(kernel: Kernel) -> list[str]:
    name = _short(kernel.name).replace("|", "\\|")
    return [f"{kernel.seconds * 1e3:.2f}", f"{kernel.calls:.1f}", kernel.part, name]


def _short(name: str) -> str:
    return name if len(name) <= SHORT_NAME else name[: SHORT_NAME - 1] + "…"
