"""Which files of text there are, and in what format."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_framework.errors import DataError

JSONL, TXT, PARQUET = ".jsonl", ".txt", ".parquet"
COMPRESSIONS = (".gz", ".zst")
FORMATS = "Give .jsonl, .txt or .parquet files (the first two also as .gz or .zst), or a folder of them."


@dataclass(frozen=True)
class InputFile:
    """A file to read.

    Attributes:
        path: Where it is.
        name: What it is called in the description: of a file given by itself its name, of a file in a folder its path
            from the folder's parent. So the description says nothing about the machine.
        format: JSONL, TXT or PARQUET.
        compression: One of COMPRESSIONS, or None.
        num_bytes: Its size on disk.
    """

    path: Path
    name: str
    format: str
    compression: str | None
    num_bytes: int


def find_inputs(paths: Sequence[Path]) -> list[InputFile]:
    """Return the files that the arguments name, in their order; those of a folder sorted by path, subfolders too.

    Args:
        paths: Files and folders.

    Raises:
        DataError: A path is missing or given twice, or of no known format, or a folder has no such file.
    """
    files: list[InputFile] = []
    for path in paths:
        if path.is_dir():
            found = list(_files_in(path))
            if not found:
                raise DataError(f"{path}: a folder without text. {FORMATS}")
            files += found
        else:
            files.append(_file(path, path.name))
    seen: set[Path] = set()
    for file in files:
        if file.path.resolve() in seen:
            raise DataError(f"{file.path}: given twice. Give it once; data.path can weigh token files.")
        seen.add(file.path.resolve())
    return files


def _files_in(folder: Path) -> Iterator[InputFile]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") for part in parts)
        if not hidden and _format_of(path) is not None and path.is_file():
            yield _file(path, "/".join((folder.resolve().name, *parts)))


def _file(path: Path, name: str) -> InputFile:
    known = _format_of(path)
    if known is None:
        raise DataError(f"{path}: its name says no known format. {FORMATS}")
    if not path.is_file():
        raise DataError(f"{path}: no such file. {FORMATS}")
    return InputFile(path, name, *known, num_bytes=path.stat().st_size)


def _format_of(path: Path) -> tuple[str, str | None] | None:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else None
    kind = suffixes[-1] if suffixes else ""
    if kind in (JSONL, TXT) or (kind == PARQUET and compression is None):
        return kind, compression
    return None
