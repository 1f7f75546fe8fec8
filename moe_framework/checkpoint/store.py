"""The checkpoint store: saves in the background, publishes when durable, loads into any layout."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from moe_framework.checkpoint import folder
from moe_framework.checkpoint.load import load_step
from moe_framework.checkpoint.manifest import Manifest
from moe_framework.checkpoint.ranks import Ranks
from moe_framework.checkpoint.save import SaveJob, write_step
from moe_framework.checkpoint.staging import stage
from moe_framework.errors import CheckpointError, RankError

_logger = logging.getLogger(__name__)


class CheckpointStore:
    """A folder of checkpoints, written and read by all ranks together.

    A background save is one thread that runs write, hash and publish in order. `dcp.async_save` covers the write
    alone, so a second thread would have to wait for it; it also stages DTensors (see `staging.py`).

    Args:
        directory: The checkpoint folder, on a file system that all ranks share; made by the first save.
        keep: Complete steps to keep, the last published first; 0 keeps all.
        async_save: Write in the background.
        group: A gloo group over all ranks that nothing else uses, for the background thread's collectives must not
            interleave with others. None is the default group: for one rank, or for saves in the foreground.

    Attributes:
        save_stall_s: Seconds for which the last `save` kept the caller.
        staging_s: Of these, the seconds for taking hold of the values: in the background, for copying them.

    Collective: the world, at construction; every rank must call.
    """

    def __init__(self, directory: Path, *, keep: int, async_save: bool, group: dist.ProcessGroup | None):
        self.save_stall_s, self.staging_s = 0.0, 0.0
        self._directory = Path(directory)
        self._keep = keep
        self._ranks = Ranks(group)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if async_save else None
        self._in_flight: Future[None] | None = None
        # `poll` communicates while the thread may be using `group`.
        self._poll_group = dist.new_group(backend="gloo") if async_save and self._ranks.size > 1 else None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        rank_state: dict[str, Any] | None = None,
    ) -> None:
        """Save a step; in the background, once the values are copied, if the store is asynchronous.

        Args:
            step: Optimizer steps done; names the folder.
            tensors: DTensors, on one or several meshes, and plain tensors that are the same on every rank; by their
                global names. They may be overwritten as soon as this returns.
            state: JSON-able, the same on every rank.
            rank_state: JSON-able, this rank's own.

        Raises:
            SaveFailedError: This save or the one in the background before it failed; the same on every rank. The
                steps saved before are untouched, and another save may succeed.
            RankError: A rank ended or does not answer.

        Collective: the store's group; every rank must call.
        """
        started = time.perf_counter()
        self.wait()
        waited = time.perf_counter()
        try:
            # Through JSON and back: a copy that later changes don't reach, and what a reader will get.
            snapshot, rank_snapshot = json.loads(json.dumps([state, rank_state or {}]))
            job = SaveJob(step, stage(tensors, copy=self._executor is not None), snapshot, rank_snapshot)
        except Exception as error:  # one rank alone may run out of memory; the others wait for it in write_step
            job = SaveJob(step, {}, {}, {}, error)
        self.staging_s = time.perf_counter() - waited
        if self._executor is None:
            self._write(job)
        else:
            self._in_flight = self._executor.submit(self._write, job)
        self.save_stall_s = time.perf_counter() - started

    @property
    def is_writing(self) -> bool:
        """Whether this rank is writing in the background; another rank may still be when it no longer is."""
        return self._in_flight is not None and not self._in_flight.done()

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            SaveFailedError: It failed; the same on every rank.
            RankError: A rank ended or does not answer.

        Collective: the store's group; every rank must call.
        """
        future, self._in_flight = self._in_flight, None
        if future is not None:
            future.result()

    def poll(self) -> bool:
        """Report without waiting whether the background is idle; cheap enough for every step.

        Returns:
            True if no rank is writing; the same on every rank.

        Raises:
            SaveFailedError: The save failed; the same on every rank, at the same call.
            RankError: A rank ended or does not answer.

        Collective: the world; every rank must call.
        """
        if self._in_flight is None:
            return True
        done = torch.tensor(int(self._in_flight.done()))
        if self._poll_group is not None:
            dist.all_reduce(done, op=dist.ReduceOp.MIN, group=self._poll_group)
        if not done.item():
            return False
        self.wait()
        return True

    def close(self) -> None:
        """Wait for the save in the background and end its thread; call before the process group is destroyed.

        Raises:
            SaveFailedError: The save failed; the same on every rank.
            RankError: A rank ended or does not answer.

        Collective: the store's group; every rank must call.
        """
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Close the store. After an error too the save in the background is waited for, so that nothing is lost.

        Raises:
            SaveFailedError: The save failed, and there was no error before; the same on every rank.
            RankError: A rank ended or does not answer, and there was no error before.

        Collective: the store's group; every rank must call.
        """
        try:
            self.close()
        except (CheckpointError, RankError) as error:
            if error_type is None:
                raise
            _logger.warning("%s", error)

    def latest_step(self) -> Path | None:
        """Folder of the newest complete step, or None.

        Returns:
            What `latest` names, or the step after it if the process died between publishing the two.

        Raises:
            CheckpointError: The folder cannot be read, or the newest manifest is damaged; the same on every rank.

        Collective: the store's group; every rank must call.
        """
        self.wait()

        def find() -> Path | None:
            folder.restore_replaced(self._directory)
            return folder.newest_step(self._directory)

        return self._ranks.on_first(find)

    def load(
        self,
        step_dir: Path,
        tensors: Mapping[str, Tensor],
        *,
        allow_extra: Callable[[str], bool] | None = None,
    ) -> Manifest:
        """Fill tensors in place from a step that was saved at any layout, bit for bit.

        Args:
            step_dir: The step's folder.
            tensors: The tensors to fill, DTensors of any layout or plain ones, allocated, by global name.
            allow_extra: Tells which names the step may have in excess, such as the optimizer's when only the
                weights are wanted; None for none.

        Returns:
            The step's manifest, with the state.

        Raises:
            CheckpointError: The step is incomplete, damaged, unsafe or of another model; the same on every rank.
                Everything but what is inside tensor files with the right checksum is checked before a
                tensor changes.

        Collective: the store's group; every rank must call.
        """
        self.wait()
        return load_step(Path(step_dir), tensors, allow_extra=allow_extra, ranks=self._ranks)

    def _write(self, job: SaveJob) -> None:
        write_step(self._directory, job, keep=self._keep, ranks=self._ranks)
