"""The verdicts as a table and as JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_framework.errors import ConfigError
from tools.parity.plan import Plan
from tools.parity.rows import Row
from tools.parity.tolerances import LARGEST_MOVE, MEASURED_SAFETY, MOVE_SAFETY, NUM_MOVES, Tolerances

# A fault can put every tensor of a model beyond the flat tolerance.
MOVES_SHOWN = 8


@dataclass(frozen=True)
class Move:
    """A tensor or norm beyond the flat tolerance of fp32, against what moved weights do to the reference.

    Attributes:
        tensor: Its name with its kind, or the norm and its step.
        difference: Of the layout.
        moved: Of the reference with its weights moved by their last place, at most; see `tolerances`.
        tolerance: What follows from it.
    """

    tensor: str
    difference: float
    moved: float
    tolerance: float


@dataclass(frozen=True)
class LayoutReport:
    """One layout.

    Attributes:
        layout: The case's name.
        rows: Its verdicts.
        choices: Choices of experts that were compared.
        near_ties: Choices that would have differed, within rounding or not; all are replayed.
        first_tensor: The first tensor that differs, or None.
        looks_like: The known fault that explains it, or None.
        error: Why the ranks ended early, or None.
        moves: Tensors and norms for which the reference was run again with moved weights.
    """

    layout: str
    rows: tuple[Row, ...]
    choices: int = 0
    near_ties: int = 0
    first_tensor: str | None = None
    looks_like: str | None = None
    error: str | None = None
    moves: tuple[Move, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every row is."""
        return self.error is None and all(row.ok for row in self.rows)


@dataclass(frozen=True)
class Report:
    """All layouts.

    Attributes:
        plan: What was run.
        device: `cpu` or `cuda`.
        tolerances: Of the precision.
        experts_backend: What computed the reference's experts.
        layouts: One for each case.
    """

    plan: Plan
    device: str
    tolerances: Tolerances
    experts_backend: str
    layouts: tuple[LayoutReport, ...]

    @property
    def ok(self) -> bool:
        """Whether every layout is."""
        return all(layout.ok for layout in self.layouts)


def to_text(report: Report) -> str:
    """Return the report as a table with a verdict per row."""
    return "\n".join(_lines(report))


def write_json(report: Report, path: Path) -> None:
    """Write the report; `rows` and `ok` are what scripts need.

    Raises:
        ConfigError: The file cannot be written.
    """
    content = {
        "ok": report.ok,
        "rows": [asdict(row) for layout in report.layouts for row in layout.rows],
        "layouts": [
            {name: value for name, value in asdict(layout).items() if name != "rows"} | {"ok": layout.ok}
            for layout in report.layouts
        ],
        "tolerances": asdict(report.tolerances),
        "options": _options(report),
    }
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json={path}: cannot be written ({error.strerror}). Give a file in a folder.") from None


def _options(report: Report) -> dict[str, Any]:
    return asdict(report.plan.options) | {"device": report.device, "experts_backend": report.experts_backend}


def _lines(report: Report) -> Iterator[str]:
    options, tolerances = report.plan.options, report.tolerances
    injected = f", injected fault: {options.inject}" if options.inject else ""
    yield (
        f"{options.steps} steps on {report.device}, precision.mode={tolerances.mode}, seed {options.seed}, "
        f"experts by {report.experts_backend}{injected}"
    )
    yield (
        f"tolerances, relative (unit roundoff of {tolerances.format} {tolerances.unit:.1e}): losses and norm "
        f"{tolerances.scalar:.1e}, gradients and first moment {tolerances.tensor:.1e}, second moment "
        f"{tolerances.square:.1e}, gap of a choice {tolerances.routing:.1e}"
    )
    if tolerances.measured:
        yield f"and at least {MEASURED_SAFETY:.2g} times the reference's own distance from one rank in fp32"
    if any(layout.moves for layout in report.layouts):
        yield (
            f"and, for tensors and norms beyond that, {MOVE_SAFETY:g} times the farthest that the reference went from "
            f"itself in {NUM_MOVES} runs with each weight moved by one unit in its last place, "
            f"at most {LARGEST_MOVE:.1e}"
        )
    for layout in report.layouts:
        yield ""
        yield from _layout_lines(layout)
    good = sum(layout.ok for layout in report.layouts)
    yield ""
    yield f"{good} of {len(report.layouts)} layouts equal one rank within tolerance"


def _layout_lines(layout: LayoutReport) -> Iterator[str]:
    yield f"{layout.layout}: {'ok' if layout.ok else 'DIFFERS'}"
    if layout.error is not None:
        yield f"  its ranks ended early: {layout.error}"
        return
    cells = [
        (row.quantity, _number(row.difference), _number(row.tolerance), "ok" if row.ok else "DIFFERS", row.tensor)
        for row in layout.rows
    ]
    header = ("quantity", "difference", "tolerance", "verdict", "where it is largest")
    widths = [max(len(line[column]) for line in (header, *cells)) for column in range(len(header))]
    for line in (header, *cells):
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))).rstrip()
    yield from _move_lines(layout.moves)
    yield f"  choices of experts that would have differed, and were replayed: {layout.near_ties} of {layout.choices:,}"
    if layout.first_tensor is not None:
        yield f"  first tensor that differs: {layout.first_tensor}"
    if layout.looks_like is not None:
        yield f"  looks like: {layout.looks_like}"
    elif not layout.ok:
        yield "  looks like: no fault that is known here"


def _move_lines(moves: tuple[Move, ...]) -> Iterator[str]:
    for move in moves[:MOVES_SHOWN]:
        verdict = "ok" if move.difference <= move.tolerance else "DIFFERS"
        yield (
            f"  ill-conditioned? {verdict}: {move.tensor} {_number(move.difference)}, the reference with moved weights "
            f"{_number(move.moved)}, tolerance {_number(move.tolerance)}"
        )
    if len(moves) > MOVES_SHOWN:
        yield f"  and {len(moves) - MOVES_SHOWN} more such, which --json lists"


def _number(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else f"{value:.2e}"
