"""`metrics.jsonl`, one JSON object a step, and JSON files that are either whole or absent."""

import json
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

_logger = logging.getLogger(__name__)

# What a number that is filled in later takes in its line: as many characters as `.6g` needs at most.
_OPEN = "null".ljust(12)
_END = "}\n"


class MetricsWriter:
    """Appends one line a step, so that the file never holds a step twice, also after a resume.

    Lines that a full disk does not take are kept, and written once it does: training does not end for them. Nor does
    a damaged file keep it from going on: its good lines are kept, and a copy of it as `metrics.damaged.1.jsonl`.

    Args:
        path: The file; its folder must exist.
        resume_step: Last step of the checkpoint that the run continues from: later lines, of steps that are
            about to be repeated, are dropped. None starts an empty file.
    """

    def __init__(self, path: Path | str, resume_step: int | None):
        self._path = Path(path)
        lines = [] if resume_step is None else _lines_up_to(self._path, resume_step)
        write_text_atomic(self._path, "".join(lines))
        self._last_step = json.loads(lines[-1])["step"] if lines else -1
        self._open: dict[str, int] = {}  # where the last line's open numbers begin, in bytes before its end
        # Without a buffer of its own: after an error it would be unknown what it still holds.
        self._file = self._path.open("ab", buffering=0)
        # What is opened to append writes at the end, wherever it is told to.
        self._filler = self._path.open("r+b", buffering=0)
        self._unwritten = b""

    def write(self, step: int, values: Mapping[str, Any], *, later: Sequence[str] = ()) -> None:
        """Append a line and flush it, so that a killed process loses no finished step.

        Args:
            step: Optimizer steps done; greater than in the line before.
            values: JSON values; numbers that are not finite become null.
            later: Names of numbers that `fill` may add; null until then.
        """
        assert step > self._last_step, f"step {step} after step {self._last_step}"
        line, tail = _dumps({"step": step, **values}).removesuffix("}"), _END
        self._last_step, self._open = step, {}
        for name in reversed(later):
            self._open[name] = len(_OPEN + tail)
            tail = f', "{name}": {_OPEN}{tail}'
        self._append((line + tail).encode())

    def fill(self, step: int, name: str, value: float) -> None:
        """Put a number that `write` left open into its line; nothing happens if that is not the last line.

        The line keeps its length, so that a program that follows the file never meets a part of a line.

        Args:
            step: Of the line.
            name: Of the number.
            value: Null if it is not finite.
        """
        if step != self._last_step or name not in self._open or self._unwritten or not math.isfinite(value):
            return
        try:
            # Not from the file's end, which is another's if a second process appends to it.
            self._filler.seek(self._file.tell() - self._open.pop(name))
            self._filler.write(f"{value:.6g}".ljust(len(_OPEN)).encode())
        except OSError as error:
            _logger.warning("%s: cannot be written (%s)", self._path, error)

    def close(self) -> None:
        """Write what is left, if there is room for it, and close the file."""
        self._append(b"")
        self._file.close()
        self._filler.close()

    def _append(self, data: bytes) -> None:
        was_stuck = bool(self._unwritten)
        self._unwritten += data
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not was_stuck:
                _logger.warning("%s: cannot be written (%s); the lines are kept and tried again", self._path, error)

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self.close()


def last_step(path: Path) -> int:
    """Return the last step of which a metrics file tells; 0 without one."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except OSError:
        return 0
    return next((step for step in map(_step_of, reversed(lines)) if step is not None), 0)


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
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        lines = list(file)
    kept: list[str] = []
    bad: list[int] = []
    newest = -1
    for number, line in enumerate(lines, start=1):
        step = _step_of(line)
        if step is None or step <= newest:
            bad.append(number)
        elif step <= last_step:
            kept.append(line)
            newest = step
    # The last line is cut off whenever a process is killed while it writes it.
    if bad and bad != [len(lines)]:
        _logger.warning(
            "%s: line %s is not a JSON object with a step after the one before; the file is kept as %s, and the good "
            "lines go on",
            path,
            ", ".join(map(str, bad[:10])) + (", …" if len(bad) > 10 else ""),
            _copy_aside(path).name,
        )
    return kept


def _copy_aside(path: Path) -> Path:
    number = 1
    while (kept := path.with_name(f"{path.stem}.damaged.{number}{path.suffix}")).exists():
        number += 1
    shutil.copyfile(path, kept)
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
