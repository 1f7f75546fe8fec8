"""`metrics.jsonl`, one JSON object a step, and JSON files that are either whole or absent."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from moe_framework.errors import DataError


class MetricsWriter:
    """Appends one line a step, so that the file never holds a step twice, also after a resume.

    Args:
        path: The file; its folder must exist.
        resume_step: Last step of the checkpoint that the run continues from: later lines, of steps that are
            about to be repeated, are dropped. None starts an empty file.

    Raises:
        DataError: On resume, a line other than the last is not a JSON object with a `step`.
    """

    def __init__(self, path: Path | str, resume_step: int | None):
        self._path = Path(path)
        lines = [] if resume_step is None else _lines_up_to(self._path, resume_step)
        write_text_atomic(self._path, "".join(lines))
        self._last_step = json.loads(lines[-1])["step"] if lines else -1
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line and flush it, so that a killed process loses no finished step.

        Args:
            step: Optimizer steps done; greater than in the line before.
            values: JSON values; numbers that are not finite become null.
        """
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        self._file.write(_dumps({"step": step, **values}) + "\n")
        self._file.flush()
        self._last_step = step

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self.close()


def write_json_atomic(path: Path | str, obj: Any) -> None:
    """Write a JSON file that a reader sees either whole or not at all.

    Args:
        path: The file; its folder must exist.
        obj: JSON values; numbers that are not finite become null.
    """
    write_text_atomic(path, _dumps(obj, indent=2) + "\n")


def write_text_atomic(path: Path | str, text: str) -> None:
    """Write a text file through a temporary neighbour that is renamed once it is on disk.

    Args:
        path: The file; its folder must exist.
        text: All of its content.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _lines_up_to(path: Path, last_step: int) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, start=1):
        step = _step_of(line)
        if step is None and number < len(lines):
            raise DataError(f"{path}: line {number} is not a JSON object with a step. Repair or remove the file.")
        if step is not None and step <= last_step:
            kept.append(line)
    return kept


def _step_of(line: str) -> int | None:
    """Return the step of a whole line, and None for one that was cut off while it was written."""
    try:
        step = json.loads(line)["step"] if line.endswith("\n") else None
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None


def _dumps(obj: Any, indent: int | None = None) -> str:
    return json.dumps(_finite(obj), indent=indent, allow_nan=False, ensure_ascii=False)


def _finite(obj: Any) -> Any:
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if isinstance(obj, Mapping):
        return {key: _finite(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_finite(value) for value in obj]
    return obj
