"""From the files of findings to the verdicts, and what has to be run once more before they can be given."""

import math
import pickle
from dataclasses import replace
from pathlib import Path

from tools.parity import diagnosis
from tools.parity.comparison import Findings, exact_path, findings_path, moved_path
from tools.parity.plan import Case, Plan, moved_case
from tools.parity.reference import Reference
from tools.parity.report import LayoutReport, Move
from tools.parity.rows import doubtful, first_tensor, label_of, limits, measured_rounding, movable, rows_of
from tools.parity.tensors import Difference
from tools.parity.tolerances import Tolerances, derive
from tools.parity.training import rate_at


def tolerances_of(plan: Plan, reference: Reference, folder: Path) -> Tolerances:
    """Derive the tolerances of the layouts that one reference is compared with.

    Args:
        plan: What was run.
        reference: From its folder.
        folder: Has the findings of the reference in fp32, where the precision is another, and with moved weights,
            where `case_to_move` wanted them.
    """
    exact, moved = exact_path(folder, reference.folder.name), moved_path(folder, reference.folder.name)
    # Written by our own rank into a folder that only this user can write.
    measured = measured_rounding(pickle.loads(exact.read_bytes()), reference) if exact.exists() else None
    tolerances = _derived(plan, measured)
    if moved.exists():
        of_moves: list[Findings] = pickle.loads(moved.read_bytes())
        names = _doubtful_of_all(plan, reference, folder, tolerances)
        far = {kind: _farthest([movable(kind, f, reference) for f in of_moves], names[kind]) for kind in names}
        tolerances = replace(tolerances, moved=far)
    return tolerances


def case_to_move(plan: Plan, reference: Reference, folder: Path) -> tuple[Case, list[str]] | None:
    """Decide whether a reference has to be run with moved weights before its layouts can be judged.

    Args:
        plan: What was run.
        reference: From its folder.
        folder: Has the findings of its layouts; one whose ranks ended early has none.

    Returns:
        The case for `comparison.run_moved` and the tensors and numbers that need it; None where there is none.
    """
    name = reference.folder.name
    case = moved_case(name, plan.references[name])
    if case is None:
        return None
    names = _doubtful_of_all(plan, reference, folder, _derived(plan, None))
    labels = [label_of(kind, name) for kind in names for name in names[kind]]
    return (case, labels) if labels else None


def judge(
    case: Case, folder: Path, number: int, reference: Reference, tolerances: Tolerances, error: str | None
) -> LayoutReport:
    """Judge one layout.

    Args:
        case: What was run.
        folder: Has its findings.
        number: The case's number, which names their file.
        reference: What it is compared with.
        tolerances: From `tolerances_of`.
        error: Why its ranks ended early, or None.
    """
    if error is not None:
        return LayoutReport(case.name, (), error=error)
    findings = _findings(folder, number)
    rows = rows_of(case.name, findings, reference, tolerances)
    fault = diagnosis.looks_like(findings, rows, tolerances)
    return LayoutReport(
        layout=case.name,
        rows=tuple(rows),
        choices=findings.routing.choices,
        near_ties=findings.routing.differing,
        moves=_moves(findings, reference, tolerances),
        first_tensor=first_tensor(findings, tolerances),
        looks_like=None if fault is None else diagnosis.explain(fault, findings, tolerances),
    )


def _derived(plan: Plan, measured: dict[str, dict[str, float]] | None) -> Tolerances:
    config = plan.cases[0].config
    return derive(config, [rate_at(config, step) for step in range(plan.options.steps)], measured)


def _findings(folder: Path, number: int) -> Findings:
    # Written by our own ranks into a folder that only this user can write.
    return pickle.loads(findings_path(folder, number).read_bytes())


def _doubtful_of_all(plan: Plan, reference: Reference, folder: Path, tolerances: Tolerances) -> dict[str, list[str]]:
    """What is doubtful in any layout of one reference, by kind, each name once."""
    found: dict[str, dict[str, None]] = {}
    for number, case in enumerate(plan.cases):
        if case.reference == reference.folder.name and findings_path(folder, number).exists():
            for kind, names in doubtful(_findings(folder, number), reference, tolerances).items():
                found.setdefault(kind, {}).update(dict.fromkeys(names))
    return {kind: list(names) for kind, names in found.items()}


def _farthest(of_moves: list[dict[str, Difference]], names: list[str]) -> dict[str, float]:
    def farthest(name: str) -> float:
        distances = [differences[name].relative for differences in of_moves]
        return max(distances) if all(math.isfinite(distance) for distance in distances) else math.inf

    return {name: farthest(name) for name in names}


def _moves(findings: Findings, reference: Reference, tolerances: Tolerances) -> tuple[Move, ...]:
    """What the moved weights were asked about in this layout."""
    flat = replace(tolerances, moved={})
    found = []
    for kind, moved in tolerances.moved.items():
        differences = movable(kind, findings, reference)
        tensors = {name: differences[name] for name in moved}
        before, after = limits(kind, tensors, flat), limits(kind, tensors, tolerances)
        found += [
            Move(label_of(kind, name), difference.relative, moved[name], after[name])
            for name, difference in tensors.items()
            if not difference.relative <= before[name]
        ]
    return tuple(found)
