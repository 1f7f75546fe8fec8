"""The verdicts: one row for each quantity of a layout."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tools.parity.comparison import Findings
from tools.parity.reference import Reference
from tools.parity.routing import Place
from tools.parity.tensors import Difference, together
from tools.parity.tolerances import LARGEST_MOVE, Tolerances
from tools.parity.training import SCALARS, Figures

KINDS = ("embedding", "head", "norm", "router", "attention", "expert gate_up", "expert down")
# Losses move by less than 1e-6 where gradients, and so their norm, move by more than 1e-5.
MOVED_SCALARS = ("grad_norm",)
NAMES = {
    "gradients": "gradient",
    "parameters": "parameters",
    "exp_avg": "Adam's first moment",
    "exp_avg_sq": "Adam's second moment",
}


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        layout: The case's name.
        quantity: What was compared.
        tensor: The tensor, step or place with the largest difference, relative to its tolerance.
        difference: That difference; a count where only equality will do.
        tolerance: What rounding allows.
        ok: Whether it is within.
    """

    layout: str
    quantity: str
    tensor: str
    difference: float
    tolerance: float
    ok: bool


def kind_of(name: str) -> str:
    """Return the kind of a parameter, one of `KINDS`, by its name."""
    if name.endswith("norm.weight"):
        return "norm"
    for part, kind in (
        ("embed.", "embedding"),
        ("lm_head.", "head"),
        (".router.", "router"),
        (".attention.", "attention"),
        (".gate_up", "expert gate_up"),
        (".down", "expert down"),
    ):
        if part in f".{name}" or name.startswith(part):
            return kind
    raise AssertionError(f"{name} is of no known kind")


def rows_of(layout: str, findings: Findings, reference: Reference, tolerances: Tolerances) -> list[Row]:
    """Judge what was found about a layout.

    Args:
        layout: The case's name.
        findings: Of its ranks.
        reference: Of one rank.
        tolerances: Of the precision.

    Returns:
        The rows, in the order of the report.
    """

    def row(quantity: str, tensor: str, difference: float, tolerance: float) -> Row:
        return Row(layout, quantity, tensor, difference, tolerance, difference <= tolerance)

    def build() -> Iterator[Row]:
        yield row("initial parameters", _first(findings.initial), len(findings.initial), 0)
        yield row("batches", *_rows(findings.figures[0], reference.figures, last=False), 0)
        yield row("ids of the next batch", *_rows(findings.figures[0], reference.figures, last=True), 0)
        yield row("tokens per step", *_first_unequal(f.tokens for f in _with(reference, findings)), 0)
        for name, difference in scalar_differences(findings, reference).items():
            quantity, step = name.split(" ", 1)
            yield row(quantity, step, difference, tolerances.of("scalars", name))
        yield row("expert load", *_first_unequal(f.loads for f in _with(reference, findings)), 0)
        routing = findings.routing
        yield row("choice of experts", _place(routing.where), routing.largest_gap, tolerances.of("routing", "gap"))
        yield row("experts' function", "layers.0.moe.experts", findings.gate.stored, tolerances.of("function", "gate"))
        for quantity, kind, tensors in _tensor_rows(findings):
            yield row(quantity, *_worst(tensors, limits(kind, tensors, tolerances)))
        unequal = findings.unequal_replicas
        yield row("replicas", _first(unequal) or f"{findings.num_copies} copies", len(unequal), 0)

    return list(build())


def limits(kind: str, tensors: dict[str, Difference], tolerances: Tolerances) -> dict[str, float]:
    """Return each tensor's tolerance, by name."""
    return {name: tolerances.of(kind, name, difference.rms) for name, difference in tensors.items()}


def failing(kind: str, findings: Findings, tolerances: Tolerances) -> list[str]:
    """Return the names of a kind's tensors that exceed their tolerance, in the model's order."""
    tensors = findings.differences[kind]
    allowed = limits(kind, tensors, tolerances)
    return [name for name, difference in tensors.items() if not difference.relative <= allowed[name]]


def scalar_differences(findings: Findings, reference: Reference) -> dict[str, float]:
    """Return the largest relative difference that any rank has of each number, by its name and step."""
    return {
        f"{name} step {step + 1}": max(_relative(f.scalars[step][name], values[name]) for f in findings.figures)
        for name in SCALARS
        for step, values in enumerate(reference.figures.scalars)
    }


def movable(kind: str, findings: Findings, reference: Reference) -> dict[str, Difference]:
    """Return the differences of a kind, one of `reference.TENSORS` or `scalars`, that moved weights may explain."""
    if kind != "scalars":
        return findings.differences[kind]
    numbers = scalar_differences(findings, reference).items()
    return {name: Difference(far, 1.0, far, 0.0) for name, far in numbers if name.split(" ")[0] in MOVED_SCALARS}


def doubtful(findings: Findings, reference: Reference, tolerances: Tolerances) -> dict[str, list[str]]:
    """Return, by kind, the names beyond their tolerance in rows that moved weights might explain.

    A row with anything beyond LARGEST_MOVE differs, whatever the reference does.
    """
    found: dict[str, list[str]] = {}
    numbers = movable("scalars", findings, reference)
    rows = [(kind, tensors) for _, kind, tensors in _tensor_rows(findings)]
    for kind, tensors in rows + [("scalars", {name: number}) for name, number in numbers.items()]:
        allowed = limits(kind, tensors, tolerances)
        beyond = {name: d.relative for name, d in tensors.items() if not d.relative <= allowed[name]}
        if all(difference <= LARGEST_MOVE for difference in beyond.values()):
            found.setdefault(kind, []).extend(beyond)
    return {kind: names for kind, names in found.items() if names}


def label_of(kind: str, name: str) -> str:
    """Return how the report calls a tensor or number of a kind."""
    if kind == "scalars":
        return name
    return f"{NAMES[kind]} of {name}" if kind != "parameters" else f"{name} after the steps"


def first_tensor(findings: Findings, tolerances: Tolerances) -> str | None:
    """Return the first tensor that differs, gradients before parameters and moments; None if there is none."""
    for kind in NAMES:
        names = failing(kind, findings, tolerances)
        if names:
            return label_of(kind, names[0])
    return None


def measured_rounding(exact: Findings, reference: Reference) -> dict[str, dict[str, float]]:
    """Return how far another precision is from the reference, as `Tolerances.measured` takes it.

    Args:
        exact: Of one rank in fp32.
        reference: In the precision that is checked.
    """
    tensors = {kind: {name: d.relative for name, d in found.items()} for kind, found in exact.differences.items()}
    others = {"routing": {"gap": exact.routing.largest_gap}, "function": {"gate": reference.function}}
    # The norm may move by as much as the whole gradient (triangle inequality), in one layout more than in another.
    gradient = together(exact.differences["gradients"].values())
    scalars = {
        name: max(far, gradient) if name.startswith("grad_norm") else far
        for name, far in scalar_differences(exact, reference).items()
    }
    return tensors | {"scalars": scalars} | others


def _tensor_rows(findings: Findings) -> Iterator[tuple[str, str, dict[str, Difference]]]:
    """The rows of tensors: quantity, kind (`reference.TENSORS`), and the differences by name."""
    for kind in KINDS:
        tensors = {n: d for n, d in findings.differences["gradients"].items() if kind_of(n) == kind}
        if tensors:
            yield f"gradient: {kind}", "gradients", tensors
    for kind in ("parameters", "exp_avg", "exp_avg_sq"):
        yield NAMES[kind], kind, findings.differences[kind]


def _with(reference: Reference, findings: Findings) -> list[Figures]:
    return [reference.figures, *findings.figures]


def _first(names: list[str]) -> str:
    return names[0] if names else ""


def _relative(actual: float, expected: float) -> float:
    if not (math.isfinite(actual) and math.isfinite(expected)):
        return math.inf
    return abs(actual - expected) / abs(expected) if expected else abs(actual)


def _worst(tensors: dict[str, Difference], allowed: dict[str, float]) -> tuple[str, float, float]:
    if not tensors:
        return "nothing was compared", math.inf, 0.0
    name = max(tensors, key=lambda n: (tensors[n].relative / allowed[n], -list(tensors).index(n)))
    return name, tensors[name].relative, allowed[name]


def _first_unequal(of_ranks: Iterable[list]) -> tuple[str, int]:
    """The first step in which a rank has another value than the reference, and how many steps."""
    expected, *others = of_ranks
    steps = [i + 1 for i in range(len(expected)) if any(other[i : i + 1] != expected[i : i + 1] for other in others)]
    return (f"step {steps[0]}" if steps else ""), len(steps)


def _rows(actual: Figures, expected: Figures, *, last: bool) -> tuple[str, int]:
    """The samples that were not read as by the reference, or not by the same number of ranks each."""
    part = slice(-1, None) if last else slice(0, -1)
    wrong: list[int] = []
    for own, wanted in zip(actual.rows[part], expected.rows[part], strict=True):
        # Each row is read by the tp ranks of one data rank.
        copies = max(own.values(), default=0)
        differing = {row for row in own | wanted if row not in wanted or own.get(row) != copies}
        wrong += sorted(sample for sample, _ in differing)
    return (f"sample {wrong[0]}" if wrong else ""), len(wrong)


def _place(place: Place | None) -> str:
    if place is None:
        return ""
    return f"layers.{place.layer}, step {place.step}, sample {place.sample}, position {place.position}"
