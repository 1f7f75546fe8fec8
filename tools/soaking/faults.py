"""Which faults happen, when, and on which rank; free of torch."""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

# What each does to a rank: the first three are signals, sent at a random moment after the step has begun.
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM")
EXCEPTION, FAILED_SAVE = "exception in a layer", "failed save"
KINDS = (*SIGNALS, EXCEPTION, FAILED_SAVE)

# Steps between one fault and the next. Fewer than these may be lost by a restart, so that each start makes progress.
LEAST_GAP, LARGEST_GAP = 3, 9
LONGEST_DELAY_S = 1.0


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        number: Its place among all.
        kind: One of `KINDS`.
        rank: The rank that suffers it.
        step: The step in which it happens, or from which on the next save fails.
        delay_s: Seconds from the step's beginning to a signal.
        layer: The layer that raises.
    """

    number: int
    kind: str
    rank: int
    step: int
    delay_s: float = 0.0
    layer: int = 0


@dataclass(frozen=True)
class Suffered:
    """A fault that happened.

    Attributes:
        number: Of the fault.
        time: Seconds since the epoch.
        newest_step: Number of the newest complete step at that time; 0 for none.
    """

    number: int
    time: float
    newest_step: int


def plan(num_faults: int, seed: int, *, num_ranks: int, num_layers: int) -> list[Fault]:
    """Draw the faults: as many of each kind as of any other, give or take one, in a random order.

    Args:
        num_faults: How many.
        seed: Of everything.
        num_ranks: Ranks.
        num_layers: Layers of the model.
    """
    rng = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(num_faults)]
    rng.shuffle(kinds)
    faults, step = [], 1
    for number, kind in enumerate(kinds):
        step += rng.randint(LEAST_GAP, LARGEST_GAP)
        rank, layer, delay_s = rng.randrange(num_ranks), rng.randrange(num_layers), rng.uniform(0, LONGEST_DELAY_S)
        faults.append(Fault(number, kind, rank, step, delay_s, layer))
    return faults


def write_plan(faults: list[Fault], path: Path) -> None:
    """Write the faults for the ranks."""
    path.write_text(json.dumps([asdict(fault) for fault in faults]))


def read_plan(path: Path) -> list[Fault]:
    """Read what `write_plan` wrote."""
    return [Fault(**fault) for fault in json.loads(path.read_text())]


def read_suffered(folder: Path) -> list[Suffered]:
    """Return the faults that happened, in order of time."""
    found = [Suffered(**json.loads(path.read_text())) for path in folder.glob("*.json")]
    return sorted(found, key=lambda one: one.time)
