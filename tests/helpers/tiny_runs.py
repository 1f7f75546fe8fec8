"""Runs of a model so small that a step takes milliseconds: their command lines, their data, and what they leave."""

import json
import random
from pathlib import Path

from moe_framework.checkpoint.folder import complete_steps

ROOT = Path(__file__).resolve().parents[2]

# Cut the genome below into 15 rows of 64 positions to train on: every four steps of four rows pass an epoch.
SIZES = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "data.seq_length=64",
    "data.heldout_fraction=0.1",
    "optim.warmup_steps=2",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.log_every=1",
    "eval.every=0",
    "device=cpu",
)


def write_genome(path: Path, *, num_bases: int = 1000, seed: int = 0) -> Path:
    """Write two random records as FASTA; the second is a third of the first, so that rows are packed and padded.

    Args:
        path: The file.
        num_bases: Bases of both records.
        seed: Of the bases.

    Returns:
        The file.
    """
    rng = random.Random(seed)
    lengths = {"first": num_bases - num_bases // 4, "second": num_bases // 4}
    records = [f">{name}\n{''.join(rng.choices('ACGT', k=length))}\n" for name, length in lengths.items()]
    path.write_text("".join(records))
    return path


def arguments(folder: Path, *changes: str, max_steps: int = 12, every: int = 3) -> list[str]:
    """Return the command-line arguments of a tiny run, after the program's name.

    Args:
        folder: Holds `genome.fa`, which is written if it is missing, and the run `folder/run`.
        *changes: Overrides; they win.
        max_steps: `train.max_steps`.
        every: `checkpoint.every`.
    """
    genome = folder / "genome.fa"
    if not genome.exists():
        write_genome(genome)
    own = (
        f"run.dir={folder}",
        "run.name=run",
        f"data.path={genome}",
        f"train.max_steps={max_steps}",
        f"checkpoint.every={every}",
    )
    return ["--config-name", "L0_sanity", *SIZES, *own, *changes]


def metrics(run_dir: Path) -> list[dict]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step of a run; a step that is there twice, or out of order, is an error."""
    lines = metrics(run_dir)
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)), f"steps of metrics.jsonl: {steps}"
    return {line["step"]: line["loss"] for line in lines}


def step_numbers(run_dir: Path) -> list[int]:
    """Return the numbers of a run's complete checkpoints."""
    return [int(step.name.removeprefix("step_")) for step in complete_steps(run_dir / "checkpoints")]


def content(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
