"""Checks of a step before a single tensor is touched: against the model, the manifest, and itself."""

import hashlib
import math
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from moe_framework.checkpoint.chunks import stored_shape
from moe_framework.checkpoint.manifest import RESTORE, FileEntry, Manifest, TensorEntry
from moe_framework.checkpoint.staging import dtype_name
from moe_framework.errors import CheckpointError


def hash_file(path: Path) -> FileEntry:
    """Size and digest of a file.

    Args:
        path: A regular file.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileEntry(size=stream.tell(), sha256=digest)


def check_tensors(
    step_dir: Path,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    allow_extra: Callable[[str], bool] | None,
) -> None:
    """Compare a step's tensors with those to be filled.

    Args:
        step_dir: The step's folder, for the message.
        manifest: The step's manifest.
        tensors: The tensors to fill, by global name; a DTensor's shape is the global one.
        allow_extra: Tells which names the step may have in excess; None for none.

    Raises:
        CheckpointError: Names, shapes or dtypes differ; the message has every difference, one a line.
    """
    wanted = {
        name: TensorEntry(tuple(stored_shape(name, tensor)), dtype_name(tensor.dtype))
        for name, tensor in tensors.items()
    }
    problems = []
    for name in sorted(wanted.keys() | manifest.tensors.keys()):
        saved, model = manifest.tensors.get(name), wanted.get(name)
        if saved is None:
            problems.append(f"'{name}' is not on disk, but in the model.")
        elif model is None:
            if allow_extra is None or not allow_extra(name):
                problems.append(f"'{name}' is on disk, but not in the model.")
        elif saved.shape != model.shape:
            problems.append(f"'{name}' is {list(saved.shape)} on disk, {list(model.shape)} in the model.")
        elif saved.dtype != model.dtype:
            problems.append(f"'{name}' is {saved.dtype} on disk, {model.dtype} in the model.")
    if problems:
        lines = "\n".join(f"{step_dir.name}: {problem}" for problem in problems)
        raise CheckpointError(f"{lines} Load with the saved config.yaml.")


def damaged_files(step_dir: Path, manifest: Manifest, *, rank: int, num_ranks: int) -> list[str]:
    """Check this rank's share of a step's files.

    Args:
        step_dir: The step's folder.
        manifest: Its manifest.
        rank: This rank.
        num_ranks: Ranks that share the files out.

    Returns:
        One sentence for each file that is missing, not a regular file, or changed.
    """
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    found = (_damage(step_dir / name, manifest.files[name]) for name in by_size[rank::num_ranks])
    return [problem for problem in found if problem is not None]


def _damage(path: Path, expected: FileEntry) -> str | None:
    try:
        status = path.lstat()
        # A link would lead out of the folder, and a pipe would block.
        if not stat.S_ISREG(status.st_mode):
            return f"{path}: not a regular file."
        if status.st_size != expected.size:
            return f"{path}: {status.st_size} bytes, {expected.size} in the manifest: truncated or replaced."
        if hash_file(path).sha256 != expected.sha256:
            return f"{path}: its SHA-256 differs from the manifest's: damaged."
    except FileNotFoundError:
        return f"{path}: missing."
    except OSError as error:
        return f"{path}: cannot be read ({error})."
    return None


def check_metadata(step_dir: Path, manifest: Manifest, metadata: Metadata) -> None:
    """Check that DCP's metadata fills the manifest's tensors, from the manifest's files only.

    The checksums hold whatever an attacker wrote, so nothing is taken for granted: a gap between chunks would leave
    a tensor unfilled, and a path could lead out of the folder.

    Args:
        step_dir: The step's folder, for the message.
        manifest: Its manifest.
        metadata: Its `.metadata`, as `safe_pickle.read_metadata` returns it.

    Raises:
        CheckpointError: They disagree.
    """
    storage: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
    problem = _table_problem(manifest, metadata)
    for info in storage.values():
        file = manifest.files.get(info.relative_path)
        if file is None:
            problem = problem or f"it refers to the file {info.relative_path!r}, which is not in the manifest"
        elif info.offset + info.length > file.size:
            problem = problem or f"it refers to bytes past the end of {info.relative_path}"
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        problem = problem or _chunk_problem(name, tensor, storage)
    if problem is not None:
        raise CheckpointError(f"{step_dir}/.metadata: {problem}. {RESTORE}")


def _table_problem(manifest: Manifest, metadata: Metadata) -> str | None:
    table = {
        name: TensorEntry(tuple(tensor.size), dtype_name(tensor.properties.dtype))
        for name, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    if table == manifest.tensors:
        return None
    names = sorted(table.keys() | manifest.tensors.keys())
    name = next(name for name in names if table.get(name) != manifest.tensors.get(name))
    return f"'{name}' is {table.get(name, 'missing')} in it, {manifest.tensors.get(name, 'missing')} in the manifest"


def _chunk_problem(name: str, tensor: TensorStorageMetadata, storage: dict[MetadataIndex, _StorageInfo]) -> str | None:
    size = tensor.size
    filled: list[ChunkStorageMetadata] = []
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size):
            return f"a chunk of '{name}' has another number of dimensions"
        ends = [offset + length for offset, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > limit for end, limit in zip(ends, size, strict=True)):
            return f"a chunk of '{name}' lies outside the tensor"
        if MetadataIndex(name, chunk.offsets) not in storage:
            return f"a chunk of '{name}' is stored nowhere"
        if 0 not in chunk.sizes:
            filled.append(chunk)
    if sum(math.prod(chunk.sizes) for chunk in filled) != math.prod(size):
        return f"the chunks of '{name}' do not fill it"
    # Disjoint chunks of the right volume inside the tensor leave no gap.
    return f"chunks of '{name}' overlap" if _any_overlap(filled) else None


def _any_overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    if len(chunks) < 2:
        return False
    # Sweep over the dim that separates most chunks, so that few are open at a time.
    dims = range(len(chunks[0].offsets))
    sweep = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=None)
    if sweep is None:
        return True  # several chunks of a scalar
    open_chunks: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[sweep]):
        start = chunk.offsets[sweep]
        open_chunks = [other for other in open_chunks if other.offsets[sweep] + other.sizes[sweep] > start]
        for other in open_chunks:
            if all(
                chunk.offsets[dim] < other.offsets[dim] + other.sizes[dim]
                and other.offsets[dim] < chunk.offsets[dim] + chunk.sizes[dim]
                for dim in dims
            ):
                return True
        open_chunks.append(chunk)
    return False
