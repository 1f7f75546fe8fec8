"""Where a run's figures go: progress, metrics.jsonl, TensorBoard, summary.json. Writes on rank 0 alone."""

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moe_framework.config.schema import Config
from moe_framework.distributed.runtime import Runtime
from moe_framework.observe.loss_spike import LossSpikeAlarm
from moe_framework.observe.metrics import MetricsWriter, write_json_atomic
from moe_framework.observe.progress import Progress
from moe_framework.observe.router_health import RouterHealthWindow, max_over_mean_load, router_health, router_scalars
from moe_framework.observe.tensorboard import TensorBoardWriter
from moe_framework.observe.throughput import StepTimer, peak_memory_bytes
from moe_framework.train.step import StepCounts, StepResult

logger = logging.getLogger(__name__)


class Reporter:
    """Receives what the loop did. Every rank has one; only rank 0's writes.

    Args:
        config: The run's.
        runtime: This rank's.
        directory: The run's folder; it exists.
        first_step: Steps done before; later lines of metrics.jsonl are dropped.
        mfu_per_token_rate: MFU per (token/s of all ranks): FLOP per token over FLOP/s of all devices.
    """

    def __init__(
        self, config: Config, runtime: Runtime, directory: Path, *, first_step: int, mfu_per_token_rate: float
    ):
        self._directory = directory
        self._device = runtime.device
        self._enabled = runtime.is_main
        self._log_every = config.train.log_every
        self._max_steps, self._checkpoint, self._eval = config.train.max_steps, config.checkpoint, config.eval
        self._mfu_per_token_rate = mfu_per_token_rate
        self._timer = StepTimer()
        self._started = time.perf_counter()
        self._num_tokens, self._step_seconds = 0, 0.0
        self._num_failed_saves = 0
        self._progress = Progress(
            config.train.max_steps, first_step, enabled=self._enabled, every=config.train.log_every
        )
        self._window = RouterHealthWindow()
        self._spikes, self._num_skipped = LossSpikeAlarm(config.train.loss_spike_sigmas), 0
        if self._enabled:
            if first_step == 0:
                _move_aside(directory / "metrics.jsonl")
            self._metrics = MetricsWriter(directory / "metrics.jsonl", first_step if first_step else None)
            self._board = TensorBoardWriter(directory / "tensorboard", first_step + 1)

    def start(self) -> None:
        """Begin to time the first step; each of the others begins where the one before ends."""
        self._timer.start()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count the block, such as an evaluation or a save, with no step; waits for what the device has yet to do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._timer.pause()
        yield
        self._timer.start()

    def end_step(self, step: int, result: StepResult, counts: StepCounts, lr: float, samples: range) -> None:
        """Record a step.

        Args:
            step: Its number, from 1.
            result: What it did.
            counts: Its global counts.
            lr: Its learning rate.
            samples: Global samples of its batch.
        """
        timing = self._timer.lap(counts.num_tokens)
        self._num_tokens += counts.num_tokens
        self._step_seconds += timing.seconds
        if not self._enabled:
            return
        health = router_health(result.tokens_per_expert_LE, result.entropy_L, counts.num_tokens)
        self._window.add(result.tokens_per_expert_LE, result.entropy_L, counts.num_tokens)
        values = {
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens_per_second": timing.tokens_per_second,
            "mfu": timing.tokens_per_second * self._mfu_per_token_rate,
            "aux_loss": result.aux_loss,
            "z_loss": result.z_loss,
            "max_over_mean_load": max_over_mean_load(health),
            "peak_memory_bytes": peak_memory_bytes(self._device),
        }
        alarms = self._alarms(step, result, samples)
        self._metrics.write(step, values | {"tokens": counts.num_tokens} | alarms, later=self._known_later(step))
        if step % self._log_every == 0:
            self._board.scalars(step, {f"train/{name}": value for name, value in values.items()})
            self._board.scalars(step, router_scalars(self._window.take()))
        self._progress.update(step, result.loss, timing.tokens_per_second)

    def _known_later(self, step: int) -> list[str]:
        """What the loop will say of a step after it has ended."""
        is_last = step == self._max_steps
        due = {
            "heldout_loss": not is_last and self._eval.every > 0 and step % self._eval.every == 0,
            "save_stall_ms": is_last or (self._checkpoint.every > 0 and step % self._checkpoint.every == 0),
        }
        return [name for name, is_due in due.items() if is_due]

    def _alarms(self, step: int, result: StepResult, samples: range) -> dict[str, Any]:
        """Say what is wrong with a step, and return what its line in metrics.jsonl says of it."""
        batch = {"samples": [samples[0], samples[-1]]}
        where = f"step {step}, samples {samples[0]} to {samples[-1]}"
        if not result.applied:
            self._num_skipped += 1
            self._board.scalars(step, {"alarms/skipped_steps": self._num_skipped})
            self._progress.note(
                f"{where}: loss={result.loss}, grad_norm={result.grad_norm}: not finite; the update was skipped "
                f"({self._num_skipped} skipped since this start)"
            )
            return {"skipped": True} | batch
        height = self._spikes.height(result.loss)
        if height is None:
            return {}
        self._board.scalars(step, {"alarms/loss_spike_sigmas": height})
        self._progress.note(
            f"{where}: loss {result.loss:.4f} is {height:.1f} standard deviations above the last steps'"
        )
        return {"loss_spike_sigmas": height} | batch

    def heldout(self, step: int, loss: float) -> None:
        """Record an evaluation: nats per target on the held-out region."""
        if self._enabled:
            self._metrics.fill(step, "heldout_loss", loss)
            self._board.scalars(step, {"heldout/loss": loss})
            self._progress.note(f"step {step}: held-out loss {loss:.4f}")

    def saved(self, step: int, stall_s: float) -> None:
        """Record a save that was begun, and for how many seconds it kept training waiting."""
        if self._enabled:
            self._metrics.fill(step, "save_stall_ms", 1e3 * stall_s)
            self._board.scalars(step, {"checkpoint/save_stall_ms": 1e3 * stall_s})

    def save_failed(self, step: int, reason: str, num_in_a_row: int) -> None:
        """Say that a step was not saved.

        Args:
            step: The step.
            reason: Why.
            num_in_a_row: Saves that failed or were left out since the last good one, this one included.
        """
        self._num_failed_saves += 1
        if self._enabled:
            limit = self._checkpoint.max_failed_saves
            told = "STEP %d IS NOT SAVED (%d in a row; more than checkpoint.max_failed_saves=%d end the run): %s"
            logger.error(told, step, num_in_a_row, limit, reason)
            self._board.scalars(step, {"checkpoint/failed_saves": self._num_failed_saves})
            self._progress.note(f"step {step}: not saved ({num_in_a_row} in a row)")

    def summarise(self, values: dict[str, Any]) -> None:
        """Write summary.json and print it as one line.

        Args:
            values: What to add to throughput and wall time.
        """
        if not self._enabled:
            return
        timing = {"tokens_per_second": None, "wall_s": time.perf_counter() - self._started}
        if self._step_seconds:
            # The last update too, for which no step waits on a GPU.
            timing["tokens_per_second"] = self._num_tokens / (self._step_seconds + self._timer.counted)
        else:
            timing |= _timing_before(self._directory / "summary.json")
        summary = values | timing
        try:
            write_json_atomic(self._directory / "summary.json", summary)
        except OSError as error:  # the run is done and saved
            logger.error("%s is not written (%s); its content is below", self._directory / "summary.json", error)
        self._progress.note("  ".join(f"{name}={_short(value)}" for name, value in summary.items()))

    def close(self) -> None:
        """Close the files and the progress bar."""
        self._progress.close()
        if self._enabled:
            self._metrics.close()
            self._board.close()


def _move_aside(path: Path) -> None:
    """Keep the metrics of an earlier run of the same name that starts again from step 0."""
    if path.exists() and path.stat().st_size:
        number = 1
        while (kept := path.with_name(f"metrics.{number}.jsonl")).exists():
            number += 1
        path.rename(kept)
        logger.warning("%s holds an earlier run; it is kept as %s", path, kept.name)


def _timing_before(path: Path) -> dict[str, Any]:
    """The timing of the run that did the steps, when this process did none."""
    try:
        before = json.loads(path.read_text())
        return {key: before[key] for key in ("tokens_per_second", "wall_s")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if value >= 100 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
