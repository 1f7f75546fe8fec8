"""One save from staged tensors to a published step."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from moe_framework import __version__
from moe_framework.checkpoint import folder
from moe_framework.checkpoint.manifest import FileEntry, Manifest, sync_folder, write_manifest
from moe_framework.checkpoint.ranks import Ranks, quiet_without_ranks
from moe_framework.checkpoint.safe_pickle import METADATA_NAME
from moe_framework.checkpoint.staging import StagedSavePlanner, StagedTensor, check_ranks_agree
from moe_framework.checkpoint.verify import hash_file
from moe_framework.errors import CheckpointError, RankError


class SaveFailedError(CheckpointError):
    """A step was not saved, but every rank is there and heard of it: training may go on, and the next save succeed."""


@dataclass(frozen=True)
class SaveJob:
    """What a rank contributes to a step.

    Attributes:
        step: Optimizer steps done.
        staged: This rank's parts of the tensors.
        state: JSON's own types only; the same on every rank.
        rank_state: JSON's own types only.
        error: What went wrong while staging, for all ranks to hear of; the rest is then empty.
    """

    step: int
    staged: dict[str, StagedTensor]
    state: dict[str, Any]
    rank_state: dict[str, Any]
    error: Exception | None = None


def write_step(directory: Path, job: SaveJob, *, keep: int, ranks: Ranks) -> None:
    """Write, hash and publish a step, then delete what is too old.

    A step whose manifest is durable is complete, and stays, even if `latest` can then not be written: that counts as a
    failed save, because others than the framework go by `latest`, but a resume finds the step.

    Args:
        directory: The checkpoint folder.
        job: This rank's part.
        keep: Complete steps to keep; 0 keeps all.
        ranks: The store's ranks.

    Raises:
        SaveFailedError: The step was not saved, or not published; what it wrote is removed where that is possible;
            the same on every rank.
        RankError: A rank ended or does not answer, so that no other save can succeed.

    Collective: the store's group; every rank must call.
    """
    step_dir, complete = directory / folder.step_name(job.step), False
    try:
        failure = _failure(lambda: _complete(step_dir, job, ranks))
        if failure is None:
            complete = True
            failure = _failure(lambda: _publish(step_dir, keep, ranks))
        if failure is not None:
            # After `together` no rank writes any more.
            ranks.on_first(lambda: folder.clean_up_failed(step_dir, complete=complete))
    except Exception as error:  # what is left is communication; the step may be complete or not
        raise RankError(
            f"{step_dir}: the save was cut short: another rank ended or does not answer ({error}). "
            "Resume: the newest complete step is found."
        ) from error
    if failure is not None:
        what = "complete, but not published" if complete else "not saved"
        raise SaveFailedError(f"{step_dir}: {what}: {failure} Steps saved before are untouched.") from failure


class _Writer(FileSystemWriter):
    """DCP's writer, whose metadata does not record the path: it is not needed, and a pickled Path is refused."""

    def storage_meta(self) -> None:
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # When a write fails, torch.save still ends its archive, and raises what that finds instead (torch 2.11).
            cause = error.__context__
            raise cause if isinstance(cause, OSError) else error from None


def _failure(action: Callable[[], None]) -> CheckpointError | None:
    try:
        action()
    except CheckpointError as error:
        return error
    return None


def _complete(step_dir: Path, job: SaveJob, ranks: Ranks) -> None:
    ranks.together(lambda: _prepare(step_dir, job, ranks))
    check_ranks_agree(job.staged, ranks.group)
    files = ranks.together(lambda: _write_tensors(step_dir, job, ranks))
    parts = ranks.gather((files, job.rank_state))
    # After this line's barrier every file and the manifest are durable, so `latest` may name the step.
    ranks.on_first(lambda: _publish_manifest(step_dir, job, parts))


def _publish(step_dir: Path, keep: int, ranks: Ranks) -> None:
    ranks.on_first(lambda: folder.publish_latest(step_dir))
    ranks.on_first(lambda: folder.delete_old_steps(step_dir, keep))


def _prepare(step_dir: Path, job: SaveJob, ranks: Ranks) -> None:
    if job.error is not None:
        raise job.error
    if ranks.rank == 0:
        folder.make_empty(step_dir)


def _write_tensors(step_dir: Path, job: SaveJob, ranks: Ranks) -> dict[str, FileEntry]:
    # No copying ahead: it would start a CUDA context on the thread's default device, GPU 0, in every rank.
    writer = _Writer(step_dir, per_thread_copy_ahead=0)
    with quiet_without_ranks():
        dcp_save(job.staged, storage_writer=writer, planner=StagedSavePlanner(), process_group=ranks.group)
    own = sorted(step_dir.glob(f"__{ranks.rank}_*.distcp"))
    own += [step_dir / METADATA_NAME] if ranks.rank == 0 else []
    files = {path.name: hash_file(path) for path in own}
    sync_folder(step_dir)
    return files


def _publish_manifest(step_dir: Path, job: SaveJob, parts: list[tuple[dict[str, FileEntry], dict[str, Any]]]) -> None:
    files = {name: entry for rank_files, _ in parts for name, entry in rank_files.items()}
    for name, entry in files.items():
        path = step_dir / name
        if not path.is_file() or path.stat().st_size != entry.size:
            raise CheckpointError(f"{path} is not visible to rank 0. Use a file system that all ranks share.")
    manifest = Manifest(
        step=job.step,
        publication=folder.next_publication(step_dir.parent),
        tensors={name: staged.entry for name, staged in job.staged.items()},
        files=files,
        versions={"torch": torch.__version__, "moe_framework": __version__},
        state=job.state,
        rank_states=[rank_state for _, rank_state in parts],
    )
    write_manifest(step_dir, manifest)
