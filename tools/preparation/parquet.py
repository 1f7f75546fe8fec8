"""Documents of Parquet files, through pyarrow; its one home."""

from collections.abc import Callable, Iterator
from typing import Any

from moe_framework.errors import DataError, DependencyError
from tools.preparation.inputs import InputFile

_ROWS_AT_A_TIME = 256


def read_parquet(file: InputFile, column: str, move: Callable[[int], None]) -> Iterator[tuple[str, str]]:
    """Yield the text of each row, and where it is; only its column is read.

    Args:
        file: The file.
        column: Name of the text's column.
        move: Told how many bytes of the file have been read.

    Raises:
        DataError: It is not Parquet, or damaged, or has no such column of text, or a row without text.
        DependencyError: pyarrow is missing.
    """
    pyarrow, parquet = _import_pyarrow(file)
    try:
        with parquet.ParquetFile(file.path) as table:
            _check_column(file, column, table.schema_arrow, pyarrow.types)
            row = 0
            for batch in table.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=[column]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    place = f"{file.path}, row {row}"
                    if text is None:
                        raise DataError(f"--field={column}: null in {place}. Correct or remove the row.")
                    # Of a file of columns, rows are what says how far reading is.
                    move(file.num_bytes * row // table.metadata.num_rows)
                    yield text, place
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file.path}: not Parquet, or damaged ({error}). Copy or make it again.") from None


def _check_column(file: InputFile, column: str, schema: Any, types: Any) -> None:
    if column not in schema.names:
        known = ", ".join(schema.names[:8]) or "none"
        raise DataError(f"--field={column}: missing in {file.path}, which has: {known}. Name the text's column.")
    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise DataError(f"--field={column}: {kind} in {file.path}, not string. Name the text's column.")


def _import_pyarrow(file: InputFile) -> tuple[Any, Any]:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DependencyError(
            f"{file.path}: reading .parquet needs pyarrow, which failed to import ({error}). Install '.[text]', or "
            "convert the file to .jsonl."
        ) from None
    return pyarrow, parquet
