"""The checkpoint folder: which steps are complete, which is the newest, and what may be deleted.

Nothing here communicates: rank 0 calls these functions and tells the other ranks.
"""

import logging
import re
import shutil
from functools import cache
from pathlib import Path

from moe_framework.checkpoint.manifest import (
    MANIFEST_NAME,
    RESTORE,
    is_plain_name,
    read_manifest,
    replace_durably,
    sync_folder,
)
from moe_framework.errors import CheckpointError

LATEST_NAME = "latest"
_DELETED_NAME = MANIFEST_NAME + ".deleted"
_REPLACED_SUFFIX = ".replaced"

_logger = logging.getLogger(__name__)


def step_name(step: int) -> str:
    """Name of a step's folder, such as `step_00000200`."""
    return f"step_{step:08d}"


def step_number(step_dir: Path) -> int | None:
    """Number of a step's folder, or None if the name is not a step's."""
    found = re.fullmatch(r"step_(\d{8,})", step_dir.name)
    return int(found.group(1)) if found else None


def is_complete(step_dir: Path) -> bool:
    """Whether a folder has a manifest, which is what makes it a step."""
    return (step_dir / MANIFEST_NAME).is_file()


def complete_steps(directory: Path) -> list[Path]:
    """Folders of the complete steps, by ascending number.

    Args:
        directory: The checkpoint folder; it need not exist.

    Raises:
        OSError: The folder exists and cannot be listed.
    """
    if not directory.exists():
        return []
    steps = [path for path in directory.iterdir() if step_number(path) is not None and is_complete(path)]
    return sorted(steps, key=lambda path: step_number(path) or 0)


def newest_step(directory: Path) -> Path | None:
    """The complete step that was published last, or None.

    This is the step that `latest` names, or the one after it if the process died between the two writes.

    Args:
        directory: The checkpoint folder; it need not exist.

    Raises:
        CheckpointError: A manifest is damaged that may be the newest one's: going back in silence would lose work.
    """
    readable = _publications(directory, strict=True)
    if not readable:
        return None
    return max(readable, key=readable.__getitem__)


def next_publication(directory: Path) -> int:
    """One more than the highest publication number in the folder."""
    return 1 + max((publication for publication, _ in _publications(directory).values()), default=0)


def publish_latest(step_dir: Path) -> None:
    """Let `latest` name a step, atomically.

    Args:
        step_dir: The step's folder, complete and durable.

    Raises:
        OSError: `latest` cannot be written.
    """
    replace_durably(step_dir.parent / LATEST_NAME, step_dir.name + "\n")


def make_empty(step_dir: Path) -> None:
    """Make an empty folder for a step that is about to be written.

    Left-overs of a killed save are removed. A complete step of the same number, which a run that went back meets
    again, is set aside until its successor is complete.

    Args:
        step_dir: The step's folder.

    Raises:
        OSError: The folder cannot be made or emptied.
    """
    if is_complete(step_dir):
        aside = _aside(step_dir)
        if aside.exists():
            shutil.rmtree(aside)
        step_dir.rename(aside)
    elif step_dir.exists():
        shutil.rmtree(step_dir)
    step_dir.mkdir(parents=True)
    sync_folder(step_dir.parent)


def restore_replaced(directory: Path) -> None:
    """Finish what a crash interrupted between setting a step aside and completing its successor.

    Only the run that writes to the folder may call this: it would delete the successor while it is written.

    Args:
        directory: The checkpoint folder; it need not exist.

    Raises:
        OSError: A folder cannot be renamed or removed.
    """
    for aside in sorted(directory.glob(f"step_*{_REPLACED_SUFFIX}")):
        step_dir = aside.with_name(aside.name.removesuffix(_REPLACED_SUFFIX))
        if step_number(step_dir) is None or not is_complete(aside):
            continue
        if is_complete(step_dir):
            shutil.rmtree(aside)
        else:
            _put_back(step_dir)


def clean_up_failed(step_dir: Path, *, complete: bool) -> None:
    """Remove what a failed save wrote, and put back the step that it was to replace; failures are logged.

    On a full disk this makes the room again that the next save needs.

    Args:
        step_dir: The folder of the step that was not saved; no rank writes to it any more.
        complete: Whether its own manifest is durable, and only what comes after it failed: it is then kept.
    """
    try:
        if complete:
            if _aside(step_dir).exists():
                shutil.rmtree(_aside(step_dir))
        elif not is_complete(step_dir):  # a complete one is the step that was not even set aside
            _put_back(step_dir)
    except OSError as error:
        _logger.warning("%s: what a failed save left could not be removed (%s); the next one tries.", step_dir, error)


def delete_old_steps(step_dir: Path, keep: int) -> None:
    """Delete what is no longer needed after a step was published; failures are logged, for the step itself is safe.

    Args:
        step_dir: The step just published; never deleted, nor is the one that `latest` names.
        keep: Complete steps to keep, the last published first; 0 keeps all.
    """
    directory = step_dir.parent
    try:
        if _aside(step_dir).exists():
            shutil.rmtree(_aside(step_dir))
        by_age = _publications(directory)
        newest_first = sorted(by_age, key=by_age.__getitem__, reverse=True)
        protected = {step_dir.name, _read_latest(directory)}
        for old in newest_first[keep:] if keep > 0 else []:
            if old.name not in protected:
                # From here on the folder is no step, however far its removal gets.
                (old / MANIFEST_NAME).rename(old / _DELETED_NAME)
                sync_folder(old)
        for half_deleted in directory.glob(f"step_*/{_DELETED_NAME}"):
            if not is_complete(half_deleted.parent):
                shutil.rmtree(half_deleted.parent)
    except (OSError, CheckpointError) as error:
        _logger.warning("%s: old steps could not be deleted (%s); delete them by hand.", directory, error)


def _put_back(step_dir: Path) -> None:
    """Remove an incomplete step; the complete one that it was to replace, if there is one, takes its place again."""
    if step_dir.exists():
        shutil.rmtree(step_dir)
    if is_complete(_aside(step_dir)):
        _aside(step_dir).rename(step_dir)
    if step_dir.parent.exists():
        sync_folder(step_dir.parent)


def _aside(step_dir: Path) -> Path:
    return step_dir.with_name(step_dir.name + _REPLACED_SUFFIX)


def _read_latest(directory: Path) -> str | None:
    try:
        name = (directory / LATEST_NAME).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return name if is_plain_name(name) and is_complete(directory / name) else None


def _publications(directory: Path, *, strict: bool = False) -> dict[Path, tuple[int, int]]:
    """(publication, number) of each complete step.

    Steps with a damaged manifest are left out, unless `strict` and it is not older than what `latest` names.
    """
    latest = _read_latest(directory)
    latest_number = step_number(directory / latest) if latest is not None else None
    found: dict[Path, tuple[int, int]] = {}
    for step_dir in complete_steps(directory):
        number = step_number(step_dir) or 0
        try:
            status = (step_dir / MANIFEST_NAME).stat()
            publication = _read_publication(step_dir, status.st_ino, status.st_mtime_ns, status.st_size)
            found[step_dir] = (publication, number)
        except (CheckpointError, OSError) as error:
            if strict and (latest_number is None or number >= latest_number):
                raise CheckpointError(f"{error} Or remove {step_dir} to resume from an older step.") from error
            _logger.warning("Ignored: %s", str(error).removesuffix(f" {RESTORE}"))
    return found


@cache
def _read_publication(step_dir: Path, inode: int, modified_ns: int, size: int) -> int:
    # Each save asks twice for all steps, and the manifest of many ranks takes tens of milliseconds to check. One that
    # was replaced has another inode or time.
    return read_manifest(step_dir).publication
