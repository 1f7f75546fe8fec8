"""Opens compressed files."""

import gzip
import zlib
from typing import BinaryIO, cast

from moe_framework.errors import DependencyError
from tools.preparation.inputs import InputFile

_BUFFER_BYTES = 2**20


def open_plain(file: InputFile, raw: BinaryIO) -> BinaryIO:
    """Open what a file holds, decompressed.

    Args:
        file: The file.
        raw: Its bytes on disk, whose position says how far reading is.

    Raises:
        DependencyError: It is .zst, and nothing that reads it is installed.
    """
    if file.compression == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb"))
    if file.compression == ".zst":
        try:
            from backports import zstd
        except ImportError as error:
            raise DependencyError(
                f"{file.path}: reading .zst needs backports.zstd, which failed to import ({error}). Install "
                "backports.zstd, or decompress the file."
            ) from None
        return cast(BinaryIO, zstd.ZstdFile(raw, "rb"))
    return raw


def damage_errors() -> tuple[type[Exception], ...]:
    """Return what reading a damaged file raises, beside OSError."""
    try:
        from backports import zstd
    except ImportError:
        return EOFError, zlib.error
    return EOFError, zlib.error, zstd.ZstdError
