"""`run.json`: what a run is made of, and each of its starts: when, where, from which step, and how it ended.

Rank 0 reads and writes it. It never holds the environment.
"""

import json
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_framework.distributed.collectives import together
from moe_framework.distributed.failure import FirstFailure
from moe_framework.errors import ExitCode, MoeFrameworkError, RankError, TrainingError
from moe_framework.observe.metrics import last_step, write_json_atomic
from moe_framework.resilience.hang_folder import hung_since
from moe_framework.train.build import Training, run_dir
from moe_framework.train.compare import digest
from moe_framework.train.facts import facts
from moe_framework.train.folders import writing
from moe_framework.train.persist import Resumed

logger = logging.getLogger(__name__)

NAME = "run.json"
METRICS = "metrics.jsonl"
INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True)
class Start:
    """One start of a run.

    Attributes:
        time: UTC, ISO 8601.
        reason: Why it was started, as far as the files tell.
        step: Steps done before it.
        world_size: Ranks.
        hosts: Host of each rank, named once each.
        config_digest: Of the configuration; starts with another one are another attempt.
        changed: Old and new value of each key that is not as in the checkpoint it goes on from.
        died_in_step: The step in which the start before it died; None if it did not.
        ended: `time`, `code`, `step` and `error`; None while it runs, and for ever if it was killed.
    """

    time: str
    reason: str
    step: int
    world_size: int
    hosts: list[str]
    config_digest: str
    changed: dict[str, list[Any]] = field(default_factory=dict)
    died_in_step: int | None = None
    ended: dict[str, Any] | None = None


class RunRecord:
    """The record of a run, whose newest start is this one.

    Args:
        directory: The run's folder; it exists.
        facts: What the run is made of; None on the ranks that do not write.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any] | None):
        self._path = directory / NAME
        self._facts = facts
        self._starts = read_starts(directory)

    def begin(
        self,
        *,
        step: int,
        last_step_seen: int,
        hosts: list[str],
        config_digest: str,
        changed: Mapping[str, list[Any]],
        max_failures_per_step: int,
        samples_of: Callable[[int], range],
    ) -> None:
        """Add a start and write the record; refuse to go on when start after start died in the same step.

        Args:
            step: Steps done before it.
            last_step_seen: Last step of which the start before wrote figures.
            hosts: Host of each rank.
            config_digest: Of the configuration.
            changed: Old and new value of each key that is not as in the checkpoint.
            max_failures_per_step: `resilience.max_failures_per_step`.
            samples_of: Gives the samples of a step.

        Raises:
            TrainingError: That many starts in a row, of one configuration, died in one step; nothing is written.
        """
        before = self._starts[-1] if self._starts else None
        died = last_step_seen + 1 if before is not None and is_failure(before) else None
        start = Start(
            time=_now(),
            reason=_reason(before, died, self._path.parent),
            step=step,
            world_size=len(hosts),
            hosts=list(dict.fromkeys(hosts)),
            config_digest=config_digest,
            changed=dict(changed),
            died_in_step=died,
        )
        starts = [*self._starts, start]
        if died is not None and deaths_in_a_row(starts) >= max_failures_per_step:
            raise TrainingError(_died_again(starts, samples_of(died), max_failures_per_step))
        self._starts = starts
        self._write()

    def end(self, code: int, *, step: int | None, error: str | None = None) -> None:
        """Write how the newest start ended.

        Args:
            code: Exit code.
            step: Steps done.
            error: The error's type and first line.
        """
        if self._facts is None:
            return
        self._starts[-1] = replace(
            self._starts[-1], ended={"time": _now(), "code": int(code), "step": step, "error": error}
        )
        try:
            self._write()
        except OSError as failure:  # what the run did, and its exit code, do not depend on this
            logger.warning("%s: how this start ended is not recorded (%s)", self._path, failure)

    @contextmanager
    def ending(self, failure: FirstFailure) -> Iterator[None]:
        """Write how the start ended if an error ends the block.

        Args:
            failure: Knows what the rank said that failed first.
        """
        try:
            yield
        except KeyboardInterrupt:
            self.end(INTERRUPTED, step=last_step(self._path.with_name(METRICS)), error="KeyboardInterrupt")
            raise
        except Exception as error:
            own = isinstance(error, MoeFrameworkError) and not isinstance(error, RankError)
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            self.end(
                ExitCode.USER_ERROR if own else ExitCode.FAILED,
                step=last_step(self._path.with_name(METRICS)),
                error=line if own else failure.first() or line,
            )
            raise

    def _write(self) -> None:
        assert self._facts is not None
        write_json_atomic(self._path, {**self._facts, "starts": [asdict(one) for one in self._starts]})


def start_record(training: Training, resumed: Resumed) -> RunRecord:
    """Record a start, once it is known where it continues: one that was refused before leaves no trace.

    Args:
        training: The run.
        resumed: Where it continues.

    Returns:
        The record.

    Raises:
        TrainingError: Too many starts died in one step; on every rank.
        ConfigError: The record cannot be written; on every rank.

    Collective: the world; every rank must call.
    """
    config, runtime, position = training.config, training.runtime, resumed.position
    hosts: list[str] = [""] * runtime.launch.world_size
    dist.all_gather_object(hosts, socket.gethostname(), group=runtime.checkpoint_group)

    def samples_of(step: int) -> range:
        size = config.train.global_batch_size
        first = position.consumed_samples + (step - position.step - 1) * size
        return range(first, first + size)

    def begin() -> RunRecord:
        directory = run_dir(config)
        record = RunRecord(directory, facts(training) if runtime.is_main else None)
        if runtime.is_main:
            with writing("run.dir", config.run.dir, directory / NAME):
                record.begin(
                    step=position.step,
                    last_step_seen=last_step(directory / METRICS),
                    hosts=hosts,
                    config_digest=digest(config),
                    changed=resumed.changed,
                    max_failures_per_step=config.resilience.max_failures_per_step,
                    samples_of=samples_of,
                )
        return record

    return together(begin)


def read_starts(directory: Path) -> list[Start]:
    """Return the starts that a run's record has, oldest first; none if there is no record that can be read."""
    try:
        return [Start(**one) for one in json.loads((directory / NAME).read_text())["starts"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s: earlier starts are not known (%s)", directory / NAME, error)
        return []


def is_failure(start: Start) -> bool:
    """Whether a start ended in a way that starting again may cure: killed, hung, or with an unexpected error."""
    return start.ended is None or start.ended["code"] == ExitCode.FAILED


def deaths_in_a_row(starts: list[Start]) -> int:
    """Return how many starts before the newest died in the step in which the last of them did.

    Starts of another configuration are another attempt.
    """
    newest, count = starts[-1], 0
    # What a start died of is written with its successor.
    for start, successor in zip(reversed(starts[:-1]), reversed(starts), strict=False):
        same = start.config_digest == newest.config_digest and successor.died_in_step == newest.died_in_step
        if newest.died_in_step is None or not same:
            break
        count += 1
    return count


def _died_again(starts: list[Start], samples: range, limit: int) -> str:
    errors = [one.ended["error"] for one in starts if one.ended and one.ended["error"]]
    return (
        f"resilience.max_failures_per_step={limit}: the last {deaths_in_a_row(starts)} starts all died in step "
        f"{starts[-1].died_in_step}, whose batch is samples {samples[0]} to {samples[-1]}. "
        f"{f'Last error: {errors[-1]}.' if errors else 'They left no error: killed, or out of memory.'} "
        "Look at that batch and at the ranks' logs. To go on, change the configuration, or set "
        "resilience.max_failures_per_step higher."
    )


def _reason(before: Start | None, died_in_step: int | None, directory: Path) -> str:
    if before is None:
        return "first start"
    if before.ended is None and hung_since(directory / "hang", datetime.fromisoformat(before.time).timestamp()):
        return f"hung in step {died_in_step}; {directory / 'hang'} has the reports"
    if before.ended is None:
        return f"the ranks were killed or lost in step {died_in_step}"
    code = before.ended["code"]
    return {
        ExitCode.DONE: "started again after it was done",
        ExitCode.STOPPED: f"stopped on request after step {before.ended['step']}",
        INTERRUPTED: "interrupted at the keyboard",
        ExitCode.FAILED: f"failed in step {died_in_step}: {before.ended['error']}",
    }.get(code, f"started again after {before.ended['error']}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
