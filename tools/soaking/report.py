"""What a soak found: whether anything was lost, and how long the recoveries took."""

import json
import statistics
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from moe_framework.observe.metrics import write_json_atomic
from tools.soaking.faults import FAILED_SAVE, KINDS, Fault, Suffered


@dataclass(frozen=True)
class Recovery:
    """What came after a fault.

    Attributes:
        fault: The fault.
        seconds: Until the run went on from a checkpoint, ready for its next step; None where it did not stop.
        lost_step: Whether it went on from an older step than the newest complete one of the fault's time.
    """

    fault: Fault
    seconds: float | None
    lost_step: bool


@dataclass(frozen=True)
class Soak:
    """The result.

    Attributes:
        launcher: What restarted the ranks.
        seed: Of the faults.
        num_planned: Faults that should have happened.
        recoveries: One for each that did.
        exit_code: Of the run with faults.
        num_steps: Steps of the run without faults.
        differing_steps: Steps whose loss is not the same, bit for bit, or is missing.
        num_starts: Starts of the run with faults.
        left_over: Processes and files that should be gone.
    """

    launcher: str
    seed: int
    num_planned: int
    recoveries: tuple[Recovery, ...]
    exit_code: int
    num_steps: int
    differing_steps: tuple[int, ...]
    num_starts: int
    left_over: tuple[str, ...]

    @property
    def complete_steps_lost(self) -> int:
        """Faults after which the newest complete step was not there any more."""
        return sum(recovery.lost_step for recovery in self.recoveries)

    @property
    def ok(self) -> bool:
        """Whether the run ended, suffered every fault, and lost nothing by them."""
        whole = self.exit_code == 0 and len(self.recoveries) == self.num_planned
        return whole and not (self.differing_steps or self.complete_steps_lost or self.left_over)


def judge(
    faults: list[Fault],
    suffered: list[Suffered],
    *,
    launcher: str,
    seed: int,
    exit_code: int,
    run_dir: Path,
    expected: dict[int, float],
    left_over: list[str],
) -> Soak:
    """Compare a run that suffered faults with one that did not.

    Args:
        faults: The plan.
        suffered: Those that happened.
        launcher: What restarted the ranks.
        seed: Of the plan.
        exit_code: Of the run with faults.
        run_dir: Its folder.
        expected: Loss of each step of the run without.
        left_over: What should be gone.
    """
    found, starts = losses(run_dir), _starts(run_dir)
    by_number = {fault.number: fault for fault in faults}
    return Soak(
        launcher=launcher,
        seed=seed,
        num_planned=len(faults),
        recoveries=tuple(_recovery(by_number[one.number], one, starts) for one in suffered),
        exit_code=exit_code,
        num_steps=len(expected),
        differing_steps=tuple(step for step, loss in expected.items() if found.get(step) != loss),
        num_starts=len(starts),
        left_over=tuple(left_over),
    )


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step of a run; a line that is being written is left out."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return {}
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def to_json(soak: Soak) -> dict[str, Any]:
    """Return the result as JSON values; seconds."""
    return {
        "ok": soak.ok,
        "faults": len(soak.recoveries),
        "planned": soak.num_planned,
        "by_kind": dict(Counter(recovery.fault.kind for recovery in soak.recoveries)),
        "steps": soak.num_steps,
        "losses_equal": not soak.differing_steps,
        "differing_steps": list(soak.differing_steps),
        "complete_steps_lost": soak.complete_steps_lost,
        "recovery_s": _spread(soak, None) | {"by_kind": {kind: _spread(soak, kind) for kind in KINDS}},
        "starts": soak.num_starts,
        "launcher": soak.launcher,
        "seed": soak.seed,
        "exit_code": soak.exit_code,
        "left_over": list(soak.left_over),
    }


def write_json(soak: Soak, path: Path) -> None:
    """Write the result."""
    write_json_atomic(path, to_json(soak))


def to_text(soak: Soak) -> str:
    """Return the result as a Markdown table and a verdict."""
    lines = ["| fault | number | recovery, median | recovery, longest |", "|---|---|---|---|"]
    counts = Counter(recovery.fault.kind for recovery in soak.recoveries)
    for kind in KINDS:
        spread = _spread(soak, kind)
        shown = [f"{spread[name]:.1f} s" if spread[name] is not None else "-" for name in ("median", "max")]
        lines.append(f"| {kind} | {counts[kind]} | {shown[0]} | {shown[1]} |")
    lines += [
        "",
        f"{len(soak.recoveries)} of {soak.num_planned} faults in {soak.num_steps} steps, {soak.num_starts} starts "
        f"under {soak.launcher}, seed {soak.seed}; the run ended with code {soak.exit_code}.",
        f"losses: {'equal, bit for bit' if not soak.differing_steps else f'differ in steps {soak.differing_steps}'}; "
        f"complete steps lost: {soak.complete_steps_lost}; left over: {', '.join(soak.left_over) or 'nothing'}",
        "OK" if soak.ok else "NOT OK",
    ]
    return "\n".join(lines)


def _starts(run_dir: Path) -> list[dict[str, Any]]:
    try:
        return json.loads((run_dir / "run.json").read_text())["starts"]
    except (FileNotFoundError, KeyError):
        return []


def _recovery(fault: Fault, suffered: Suffered, starts: list[dict[str, Any]]) -> Recovery:
    # A failed save stops nothing; what it must not do is to touch the steps before it, which the next start shows.
    after = [one for one in starts if datetime.fromisoformat(one["time"]).timestamp() > suffered.time]
    if not after:
        return Recovery(fault, None, lost_step=fault.kind != FAILED_SAVE)
    seconds = datetime.fromisoformat(after[0]["time"]).timestamp() - suffered.time
    lost = after[0]["step"] < suffered.newest_step
    return Recovery(fault, None if fault.kind == FAILED_SAVE else seconds, lost)


def _spread(soak: Soak, kind: str | None) -> dict[str, float | None]:
    recoveries = [one for one in soak.recoveries if kind is None or one.fault.kind == kind]
    seconds = [one.seconds for one in recoveries if one.seconds is not None]
    if not seconds:
        return {"median": None, "max": None}
    return {"median": statistics.median(seconds), "max": max(seconds)}
