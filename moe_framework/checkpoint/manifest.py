"""The manifest: what a step contains, as JSON; a step without one does not exist."""

import contextlib
import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_framework.errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
RESTORE = "Restore the file from a copy, or resume from another step."


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the unsharded model.

    Attributes:
        shape: Global shape.
        dtype: Name of the torch dtype, such as `float32`.
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FileEntry:
    """A file of the step's folder.

    Attributes:
        size: Bytes.
        sha256: Digest of the content, in lower-case hexadecimal.
    """

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a step that is not a tensor.

    Attributes:
        step: Optimizer steps done.
        publication: Counts the saves of one checkpoint folder, from 1: the newest step is the one published last,
            which after a resume from an older step is not the one with the highest number.
        tensors: Every tensor by its global name.
        files: Every other file of the folder by its plain name.
        versions: Versions of the packages that wrote the step.
        state: The caller's state, the same on every rank: configuration, layout, schedule, data position.
        rank_states: What differs by rank, such as random number generators; one entry per rank.
    """

    step: int
    publication: int
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    versions: dict[str, str]
    state: dict[str, Any]
    rank_states: list[dict[str, Any]]


def write_manifest(step_dir: Path, manifest: Manifest) -> None:
    """Write a step's manifest atomically and durably; from then on the step is complete.

    Args:
        step_dir: The step's folder; every file of the manifest is in it and durable.
        manifest: The content; `state` and `rank_states` are what JSON gives back.

    Raises:
        OSError: The file cannot be written.
    """
    body = {"format_version": FORMAT_VERSION, **asdict(manifest)}
    body = json.loads(json.dumps(body))
    text = json.dumps({**body, "checksum": _checksum(body)}, indent=1)
    replace_durably(step_dir / MANIFEST_NAME, text)


def read_manifest(step_dir: Path) -> Manifest:
    """Read and check a step's manifest.

    Args:
        step_dir: The step's folder.

    Returns:
        The manifest. Its file names are plain, so none leads out of the folder.

    Raises:
        CheckpointError: There is none, or it is damaged, of another format version, or names a file outside.
    """
    path = Path(step_dir) / MANIFEST_NAME
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{step_dir}: no {MANIFEST_NAME}, so this is not a complete step. Give the folder of a complete one."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Make it readable.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}). {RESTORE}") from error
    try:
        return _parse(body)
    except _FieldError as error:
        raise CheckpointError(f"{path}: {error}. {RESTORE}") from error


def is_plain_name(name: str) -> bool:
    """Whether a name denotes a file directly inside a folder, on any operating system."""
    return name not in ("", ".", "..") and not re.search(r"[/\\\x00]", name)


def replace_durably(path: Path, text: str) -> None:
    """Write a text file so that a crash leaves the old or the new content, never a part.

    Args:
        path: The file.
        text: Its new content.

    Raises:
        OSError: The file cannot be written; nothing new is left beside it, if it can be removed.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a file's own fsync does not cover them.

    Args:
        folder: The folder.

    Raises:
        OSError: It cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _FieldError(Exception):
    """A field of the manifest is wrong; the caller adds the path and the remedy."""


def _checksum(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _parse(body: Any) -> Manifest:
    body = _typed("the manifest", body, dict)
    version = body.get("format_version")
    if version != FORMAT_VERSION:
        raise _FieldError(f"format_version={version!r}, this release reads {FORMAT_VERSION}")
    checksum = body.pop("checksum", None)
    if checksum != _checksum(body):
        raise _FieldError("the content does not match its checksum: the file is damaged")
    body.pop("format_version")
    fields = Manifest.__dataclass_fields__
    if body.keys() != fields.keys():
        raise _FieldError(f"fields {sorted(body.keys() ^ fields.keys())} are missing or unknown")
    rank_states = _typed("rank_states", body["rank_states"], list)
    return Manifest(
        step=_natural("step", body["step"]),
        publication=_natural("publication", body["publication"]),
        tensors={name: _tensor_entry(name, entry) for name, entry in _typed("tensors", body["tensors"], dict).items()},
        files={name: _file_entry(name, entry) for name, entry in _typed("files", body["files"], dict).items()},
        versions={
            name: _typed(f"versions.{name}", version, str)
            for name, version in _typed("versions", body["versions"], dict).items()
        },
        state=_typed("state", body["state"], dict),
        rank_states=[_typed(f"rank_states[{rank}]", state, dict) for rank, state in enumerate(rank_states)],
    )


def _tensor_entry(name: str, entry: Any) -> TensorEntry:
    if not isinstance(entry, dict) or entry.keys() != {"shape", "dtype"}:
        raise _FieldError(f"tensors.{name} must have shape and dtype")
    shape = _typed(f"tensors.{name}.shape", entry["shape"], list)
    return TensorEntry(
        shape=tuple(_natural(f"tensors.{name}.shape", size) for size in shape),
        dtype=_typed(f"tensors.{name}.dtype", entry["dtype"], str),
    )


def _file_entry(name: str, entry: Any) -> FileEntry:
    if not is_plain_name(name) or name == MANIFEST_NAME:
        raise _FieldError(f"the file name {name!r} is not a plain name inside the folder")
    if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"}:
        raise _FieldError(f"files.{name} must have size and sha256")
    digest = _typed(f"files.{name}.sha256", entry["sha256"], str)
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise _FieldError(f"files.{name}.sha256={digest!r} is not a SHA-256 digest")
    return FileEntry(size=_natural(f"files.{name}.size", entry["size"]), sha256=digest)


def _natural(name: str, value: Any) -> int:
    # bool is an int to isinstance
    if type(value) is not int or value < 0:
        raise _FieldError(f"{name}={value!r} is not a whole number from 0 up")
    return value


def _typed[T](name: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise _FieldError(f"{name} is a {type(value).__name__}, not a {kind.__name__}")
    return value
