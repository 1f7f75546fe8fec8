"""A pool of started ranks: tests of several processes without paying torch's import for each.

    def losses_by_rank(seed: int) -> float: ...

    def test_ranks_agree(ranks):
        first, second = ranks.run(losses_by_rank, 2, seed=0)

`ranks` is the fixture of `tests/conftest.py`. The function runs in a fresh gloo process group, with torchrun's
variables (RANK, WORLD_SIZE, MASTER_ADDR, …) set, and must be at the top level of its module.
"""

import atexit
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.helpers.rank_worker import Job, Outcome, serve

MAX_THREADS = 400
MAX_WORLD_SIZE = 8
TIMEOUT_S = 120.0
GRACE_S = 5.0


class RanksFailedError(AssertionError):
    """Some ranks of a job raised, hung or died; the message has each one's traceback or stacks."""


@dataclass
class _Worker:
    process: Any  # a SpawnProcess, whose type is not public
    connection: Connection
    stack_path: Path


class RankPool:
    """Processes that run functions as the ranks of a gloo process group; started when first needed.

    Args:
        grace_s: Seconds that the other ranks of a job get once one has failed, before they count as hung.
    """

    def __init__(self, *, grace_s: float = GRACE_S):
        self._grace_s = grace_s
        self._workers: list[_Worker] = []
        self._num_jobs = 0
        self._folder = Path(tempfile.mkdtemp(prefix="rank_pool_"))

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """Call the function on every rank.

        Args:
            function: A function at the top level of its module.
            world_size: Number of ranks, 1 to 8.
            *args: Picklable arguments, the same on every rank.
            timeout_s: Seconds after which the job counts as hung.
            **kwargs: Picklable keyword arguments.

        Returns:
            The results in rank order.

        Raises:
            RanksFailedError: A rank raised, hung or died.
        """
        outcomes = self._outcomes(function, world_size, args, kwargs, timeout_s)
        failures = [f"rank {rank}:\n{outcome.trace}" for rank, outcome in enumerate(outcomes) if outcome.failed]
        if failures:
            raise RanksFailedError("\n".join(failures))
        return [pickle.loads(outcome.result) for outcome in outcomes if outcome.result is not None]

    def run_expecting_error(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S, **kwargs: Any
    ) -> list[tuple[str, str] | None]:
        """Call the function on every rank and return the errors.

        Args:
            function: A function at the top level of its module.
            world_size: Number of ranks, 1 to 8.
            *args: Picklable arguments, the same on every rank.
            timeout_s: Seconds after which the job counts as hung.
            **kwargs: Picklable keyword arguments.

        Returns:
            Per rank (name of the exception's type, its message), or None where nothing was raised.

        Raises:
            RanksFailedError: A rank hung or died, also because another one raised.
        """
        outcomes = self._outcomes(function, world_size, args, kwargs, timeout_s)
        return [(outcome.error_type, outcome.message) if outcome.failed else None for outcome in outcomes]

    @property
    def pids(self) -> list[int]:
        """Process ids of the started ranks."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End every process and remove the pool's files; the pool starts again if it is used again."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    def _outcomes(
        self, function: Callable[..., Any], world_size: int, args: tuple, kwargs: dict, timeout_s: float
    ) -> list[Outcome]:
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size={world_size}: the pool has 1 to {MAX_WORLD_SIZE} ranks.")
        arguments = pickle.dumps((args, kwargs))
        self._start(world_size)
        try:
            self._send_jobs(f"{function.__module__}:{function.__qualname__}", arguments, world_size, timeout_s)
            outcomes = self._collect(world_size, timeout_s)
            self._tear_down(world_size, everyone_succeeded=not any(outcome.failed for outcome in outcomes))
        except BaseException:  # pytest's timeout and Ctrl-C too: the ranks are in an unknown state
            self._kill()
            raise
        return outcomes

    def _start(self, world_size: int) -> None:
        if not all(worker.process.is_alive() for worker in self._workers) or self._has_many_threads():
            self._kill()
        self._folder.mkdir(parents=True, exist_ok=True)
        atexit.register(self.close)
        context = multiprocessing.get_context("spawn")
        started = range(len(self._workers), world_size)
        for index in started:
            ours, theirs = context.Pipe()
            stack_path = self._folder / f"stacks_{index}.txt"
            # Not a daemon: those may not start processes of their own.
            process = context.Process(target=serve, args=(theirs, str(stack_path)), name=f"rank-{index}")
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stack_path))
        for index in started:
            if not self._workers[index].connection.poll(TIMEOUT_S):
                self._kill()
                raise RanksFailedError(f"rank {index} did not start within {TIMEOUT_S:g} s")
            self._workers[index].connection.recv()

    def _has_many_threads(self) -> bool:
        """Whether torch keeps so many destroyed groups alive, each with its threads, that the ranks get slow."""
        threads = (Path(f"/proc/{worker.process.pid}/task") for worker in self._workers)
        return any(folder.is_dir() and len(list(folder.iterdir())) > MAX_THREADS for folder in threads)

    def _send_jobs(self, target: str, arguments: bytes, world_size: int, timeout_s: float) -> None:
        self._num_jobs += 1
        master_port = _free_port()
        for rank, worker in enumerate(self._workers[:world_size]):
            job = Job(
                target=target,
                arguments=arguments,
                rank=rank,
                world_size=world_size,
                init_method=(self._folder / f"store_{self._num_jobs}").as_uri(),
                master_port=master_port,
                timeout_s=timeout_s + 2 * self._grace_s,  # the pool's own timeout comes first: it shows stacks
                import_paths=tuple(path for path in sys.path if path),
            )
            worker.connection.send(job)

    def _collect(self, world_size: int, timeout_s: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout_s
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < world_size:
            pending = {rank: self._workers[rank] for rank in range(world_size) if rank not in outcomes}
            arrived, dead = self._wait(pending, deadline - time.monotonic())
            for rank in arrived:
                outcomes[rank] = self._workers[rank].connection.recv()
                if outcomes[rank].failed:
                    deadline = min(deadline, time.monotonic() + self._grace_s)
            if dead or not arrived:
                raise RanksFailedError(self._describe(world_size, outcomes, dead, timeout_s))
        return [outcomes[rank] for rank in range(world_size)]

    def _tear_down(self, world_size: int, *, everyone_succeeded: bool) -> None:
        pending = dict(enumerate(self._workers[:world_size]))
        for worker in pending.values():
            worker.connection.send(everyone_succeeded)
        deadline = time.monotonic() + self._grace_s
        while pending:
            arrived, dead = self._wait(pending, deadline - time.monotonic())
            for rank in arrived:
                pending.pop(rank).connection.recv()
            if dead or not arrived:
                if everyone_succeeded:
                    raise RanksFailedError(f"Ranks {sorted(pending)} did not leave the process group after the job.")
                return self._kill()
        return None

    @staticmethod
    def _wait(workers: dict[int, _Worker], timeout_s: float) -> tuple[list[int], list[int]]:
        """Return the ranks that have sent something and the ranks that died without it."""
        handles = [handle for worker in workers.values() for handle in (worker.connection, worker.process.sentinel)]
        ready = set(wait(handles, timeout=max(0.0, timeout_s)))
        dead = [rank for rank, worker in workers.items() if worker.process.sentinel in ready]
        arrived = [rank for rank, worker in workers.items() if worker.connection in ready and rank not in dead]
        return arrived, dead

    def _describe(self, world_size: int, outcomes: dict[int, Outcome], dead: list[int], timeout_s: float) -> str:
        hung = [rank for rank in range(world_size) if rank not in outcomes and rank not in dead]
        stacks = self._stacks(hung)
        lines = []
        for rank in range(world_size):
            if rank in dead:
                self._workers[rank].process.join()
                lines.append(f"rank {rank}: died with exit code {self._workers[rank].process.exitcode}")
            elif rank in outcomes:
                lines.append(f"rank {rank}:\n{outcomes[rank].trace}" if outcomes[rank].failed else f"rank {rank}: done")
            else:
                lines.append(f"rank {rank}: no answer (timeout {timeout_s:g} s); its stacks:\n{stacks[rank]}")
        return "\n".join(lines)

    def _stacks(self, hung: list[int]) -> dict[int, str]:
        for rank in hung:
            if self._workers[rank].stack_path.exists():  # from then on the signal is handled
                os.kill(self._workers[rank].process.pid, signal.SIGUSR2)
        time.sleep(0.3)
        paths = {rank: self._workers[rank].stack_path for rank in hung}
        return {rank: path.read_text() if path.exists() else "(starting)" for rank, path in paths.items()}

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers.clear()
        for path in self._folder.glob("st*"):
            path.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
