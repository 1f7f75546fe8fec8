"""Kills one rank of a training command at a random moment of a save in the background, again and again."""

import os
import random
import signal
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

from moe_framework.checkpoint.folder import complete_steps, is_complete, step_number
from tests.helpers.commands import Command, started, torchrun

POLL_S = 5e-4
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        rank: The rank that died.
        saving: Number of the step that was being saved.
        after_s: Seconds from the first sight of that step's folder to the kill.
        files: Files of the folder when all ranks had ended.
        resumed: Number of the step that the next start resumed from; None if it began anew.
    """

    rank: int
    saving: int
    after_s: float
    files: tuple[str, ...]
    resumed: int | None = None

    @property
    def published(self) -> bool:
        """Whether the step was complete in the end."""
        return "manifest.json" in self.files


def run_with_kills(arguments: list[str], run_dir: Path, *, num_ranks: int, num_kills: int, seed: int) -> list[Kill]:
    """Start a command again and again, kill a rank during a save each time, and at last let it finish.

    Args:
        arguments: Of the training command.
        run_dir: Where it writes; the output of each start is kept next to it.
        num_ranks: Ranks.
        num_kills: Starts that are killed.
        seed: Of the moments and the ranks.

    Returns:
        The kills.

    Raises:
        AssertionError: A start failed by itself, or a killed one ended as if all was well.
    """
    rng = random.Random(seed)
    kills: list[Kill] = []
    save_times: list[float] = []
    for number in range(num_kills + 1):
        left_over = _changes(run_dir)
        with started(torchrun(num_ranks, arguments), run_dir.with_name(f"start_{number}.log")) as command:
            kill = _kill_during_save(command, run_dir, left_over, rng, save_times) if number < num_kills else None
            code = command.wait(TIMEOUT_S)
        if kills:
            kills[-1] = replace(kills[-1], resumed=_resumed_step(command.output))
        kills += [kill] if kill else []
        assert (code == 0) == (kill is None), f"start {number} ended with {code}:\n{command.output}"
    return kills


def table(kills: list[Kill]) -> str:
    """Return the kills as lines of text."""
    lines = ["rank  saving    after  files  complete  resumed from"]
    lines += [
        f"{kill.rank:4}  {kill.saving:6}  {1e3 * kill.after_s:4.0f} ms  {len(kill.files):5}"
        f"  {'yes' if kill.published else 'no':8}  {kill.resumed}"
        for kill in kills
    ]
    return "\n".join(lines)


def _kill_during_save(
    command: Command, run_dir: Path, left_over: dict[Path, int], rng: random.Random, save_times: list[float]
) -> Kill:
    # Not in the first save of a start, so that each start gets further and there is always a step to resume from.
    for _ in range(rng.randint(1, 2)):
        step_dir, began = _wait_for_save(command, run_dir, left_over)
        while not is_complete(step_dir):
            _check_running(command)
            time.sleep(POLL_S)
        save_times.append(time.monotonic() - began)
    ranks = command.ranks()
    rank = rng.choice(sorted(ranks))
    step_dir, began = _wait_for_save(command, run_dir, left_over)
    # A little longer than a save takes, so that the moments around publication are met too.
    time.sleep(rng.uniform(0, 1.2) * statistics.median(save_times))
    os.kill(ranks[rank], signal.SIGKILL)
    after_s = time.monotonic() - began
    command.wait(TIMEOUT_S)
    files = tuple(sorted(path.name for path in step_dir.iterdir())) if step_dir.exists() else ()
    return Kill(rank, step_number(step_dir) or 0, after_s, files)


def _wait_for_save(command: Command, run_dir: Path, left_over: dict[Path, int]) -> tuple[Path, float]:
    """Wait until a step is begun; return its folder and when that was seen."""
    while True:
        _check_running(command)
        # Steps that are being deleted have no manifest either, but lower numbers.
        newest = max((step_number(step) or 0 for step in complete_steps(run_dir / "checkpoints")), default=0)
        for step_dir, changed in _changes(run_dir).items():
            if (step_number(step_dir) or 0) > newest and left_over.get(step_dir) != changed:
                return step_dir, time.monotonic()
        time.sleep(POLL_S)


def _changes(run_dir: Path) -> dict[Path, int]:
    """The incomplete step folders and when they changed last, in nanoseconds."""
    found = {}
    for step_dir in (run_dir / "checkpoints").glob("step_*"):
        try:
            if not is_complete(step_dir):
                found[step_dir] = step_dir.stat().st_mtime_ns
        except FileNotFoundError:
            continue
    return found


def _check_running(command: Command) -> None:
    assert command.process.poll() is None, f"ended before it was killed:\n{command.output}"


def _resumed_step(output: str) -> int | None:
    lines = [line for line in output.splitlines() if line.startswith("resumed from ")]
    return step_number(Path(lines[0].split()[2])) if lines else None
