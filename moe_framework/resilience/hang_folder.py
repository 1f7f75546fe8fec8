"""The folder of a run's hang reports. Each file is whole or absent; those of earlier hangs lie in numbered folders."""

import contextlib
import json
import os
from pathlib import Path

from moe_framework.resilience.hang_merge import diagnose
from moe_framework.resilience.hang_page import page
from moe_framework.resilience.hang_report import RankReport, from_json, to_json, to_text

PAGE = "report.txt"
_SUMMARY = "report.json"


class HangFolder:
    """Where the ranks of a run leave their reports, and find each other's.

    Args:
        path: The folder; made when it is first written to.

    A report counts as one of this hang if it was written after the reader's own last progress: clocks of hosts may
    differ by less than `resilience.hang_timeout_s`.
    """

    def __init__(self, path: Path):
        self.path = path

    @property
    def page_path(self) -> Path:
        """The merged page."""
        return self.path / PAGE

    def rank_path(self, rank: int) -> Path:
        """A rank's text."""
        return self.path / f"rank_{rank}.txt"

    def set_aside(self) -> None:
        """Move what an earlier hang left into a folder with the next number.

        Raises:
            OSError: The folder cannot be written.
        """
        names = [PAGE, _SUMMARY]
        files = [self.path / name for name in names if (self.path / name).exists()] + list(self.path.glob("rank_*.*"))
        if not files:
            return
        number = 1 + max((int(one.name) for one in self.path.iterdir() if one.name.isdecimal()), default=0)
        aside = self.path / str(number)
        aside.mkdir()
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                file.rename(aside / file.name)

    def write(self, report: RankReport) -> None:
        """Write a rank's report, as text and for the merge.

        Raises:
            OSError: The folder cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.rank_path(report.rank), to_text(report))
        _write(self.rank_path(report.rank).with_suffix(".json"), json.dumps(to_json(report)))

    def reports(self, world_size: int, since_ns: int) -> dict[int, RankReport]:
        """Return the reports of this hang, by rank; a file that cannot be read counts as none.

        Args:
            world_size: Number of ranks.
            since_ns: `time.time_ns()` of the reader's last progress.
        """
        found = {}
        for rank in range(world_size):
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
                report = from_json(json.loads(self.rank_path(rank).with_suffix(".json").read_text(encoding="utf-8")))
                if report.written_ns >= since_ns:
                    found[rank] = report
        return found

    def reported(self, rank: int, since_ns: int) -> bool:
        """Whether a rank has reported this hang, by its file's time."""
        return _written_since(self.rank_path(rank).with_suffix(".json"), since_ns)

    def merge(self, reports: dict[int, RankReport], *, written_by: int, world_size: int) -> str:
        """Write the page from the ranks' reports.

        Returns:
            The page.

        Raises:
            OSError: The folder cannot be written.
        """
        diagnosis = diagnose(reports, world_size)
        text = page(reports, diagnosis, written_by=written_by, world_size=world_size)
        summary = {
            "headline": diagnosis.headline,
            "place": None if diagnosis.place is None else diagnosis.place._asdict(),
            "suspects": diagnosis.suspects,
            "absent": diagnosis.absent,
            "written_by": written_by,
            "hung": any(report.is_of_hang for report in reports.values()),
        }
        _write(self.path / _SUMMARY, json.dumps(summary, indent=2) + "\n")
        _write(self.page_path, text)
        return text

    def is_merged(self, since_ns: int) -> bool:
        """Whether the page of this hang is there."""
        return _written_since(self.page_path, since_ns)


def hung_since(path: Path, time_s: float) -> bool:
    """Whether a folder has the report of a hang, and not of an error of a collective, from after a time.

    Args:
        path: The folder; it need not exist.
        time_s: Seconds since the epoch.
    """
    try:
        summary = path / _SUMMARY
        return summary.stat().st_mtime >= time_s and bool(json.loads(summary.read_text(encoding="utf-8"))["hung"])
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _written_since(path: Path, since_ns: int) -> bool:
    try:
        return path.stat().st_mtime_ns >= since_ns
    except OSError:
        return False


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
