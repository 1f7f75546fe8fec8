"""Whole training runs through the documented command, for the tests that compare them.

Nearly all of a run's time goes into imports and start, so each is launched once a session, however many tests read
it, and several run at a time:

    @needs(EXACT, BF16)
    def test_bf16_follows_fp32(rows):
        assert rows(BF16)[1]["loss"] == pytest.approx(rows(EXACT)[1]["loss"], rel=5e-3)
"""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.variables import NO_MULTICAST
from tests.helpers.commands import SCRIPT, Command, started

STEPS = range(1, 7)
# Resumed runs continue the save in the middle.
SAVED_STEP = 3
SHORT = (
    f"train.max_steps={len(STEPS)}",
    "optim.warmup_steps=2",
    # At the configuration's rate the loss first rises to 2.9, and roundings grow to 0.9% of it within three steps.
    "optim.lr=3e-4",
    f"checkpoint.every={SAVED_STEP}",
    "eval.every=0",
)
TIMEOUT_S = 300.0
# Each keeps about two cores busy while it starts, and holds 1 to 2 GB of its GPU.
MAX_AT_ONCE = 8
SHOWN_CHARACTERS = 5000

# Of each step, its line of metrics.jsonl.
type Rows = dict[int, dict[str, float]]


@dataclass(frozen=True)
class Run:
    """A short run of `L0_sanity` on GPUs.

    Attributes:
        overrides: What differs from it and from `SHORT`.
        num_ranks: Ranks, each with a GPU of its own.
        resumes: The run whose checkpoint of `SAVED_STEP` is continued, or None.
    """

    overrides: tuple[str, ...]
    num_ranks: int = 1
    resumes: "Run | None" = None

    def obstacle(self) -> str | None:
        """Why it cannot run here, or None."""
        # Where there is no GPU at all, every GPU test is skipped anyway.
        if self.num_ranks > max(1, torch.cuda.device_count()):
            return f"needs {self.num_ranks} GPUs"
        if "experts.backend=te" in self.overrides and find_spec("transformer_engine") is None:
            return "needs transformer_engine"
        return None if self.resumes is None else self.resumes.obstacle()


def needs(*runs: Run) -> Callable[[Any], Any]:
    """Let these runs start before the first test, all those of the session's tests at once.

    Args:
        *runs: The runs that the decorated test reads; it is skipped where one of them cannot run.
    """
    obstacle = next((found for run in runs if (found := run.obstacle())), None)

    def mark(test: Any) -> Any:
        test.runs = runs
        return pytest.mark.skipif(obstacle is not None, reason=str(obstacle))(test)

    return mark


class Runs:
    """Launches runs, each once, in threads.

    Args:
        folder: For the runs' folders and logs.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        num_cores = len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(max(1, min(MAX_AT_ONCE, num_cores // 2)))
        self._directories: dict[Run, Future[Path]] = {}
        self._running: set[Command] = set()

    def start(self, run: Run) -> Future[Path]:
        """Launch a run, after the one that it resumes, unless that was done; the result is the run's directory."""
        if run not in self._directories:
            # Submitted first, and so never waiting for the thread that waits for it.
            resumed = None if run.resumes is None else self.start(run.resumes)
            folder = self._folder / f"run_{len(self._directories)}"
            self._directories[run] = self._threads.submit(self._finish, run, folder, resumed)
        return self._directories[run]

    def rows(self, run: Run) -> Rows:
        """What a run wrote, once it has ended.

        Raises:
            AssertionError: It, or the run that it resumes, failed or took too long; with the end of what it printed.
        """
        lines = (self.start(run).result() / "metrics.jsonl").read_text().splitlines()
        return {row["step"]: row for row in map(json.loads, lines)}

    def close(self) -> None:
        """End what still runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for command in list(self._running):
            command.kill()
        self._threads.shutdown()

    def _finish(self, run: Run, folder: Path, resumed: Future[Path] | None) -> Path:
        overrides = [*SHORT, *run.overrides, f"run.dir={folder}"]
        if resumed is not None:
            overrides.append(f"checkpoint.resume={resumed.result()}/checkpoints/step_{SAVED_STEP:08d}")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run.num_ranks}"]
        variables = [f"{name}={value}" for name, value in NO_MULTICAST.items()]
        command = ["env", *variables, *launcher, SCRIPT, "--config-name", "L0_sanity", "device=cuda", *overrides]
        with started(command, folder.with_suffix(".log")) as running:
            self._running.add(running)
            try:
                code = running.wait(TIMEOUT_S)
            finally:
                self._running.discard(running)
        assert code == 0, f"{run} ended with exit code {code}:\n{running.output[-SHOWN_CHARACTERS:]}"
        return folder / "L0_sanity"
