"""The folder of reports."""

import json
from dataclasses import replace
from pathlib import Path

from moe_framework.resilience.hang_folder import HangFolder
from tests.unit.resilience.reports import SECOND, WRITTEN_NS, place, report


def test_a_written_report_is_text_and_can_be_read_back(tmp_path: Path):
    folder = HangFolder(tmp_path / "run/hang")
    one = report(1, [place("router")])
    folder.write(one)
    assert sorted(path.name for path in folder.path.iterdir()) == ["rank_1.json", "rank_1.txt"]
    assert folder.rank_path(1).read_text().startswith("rank 1 of 4")
    assert folder.reports(4, WRITTEN_NS) == {1: one}


def test_reports_from_before_the_readers_last_progress_are_of_another_hang(tmp_path: Path):
    folder = HangFolder(tmp_path)
    folder.write(report(0, [place("router")]))
    folder.write(replace(report(1, [place("router")]), written_ns=WRITTEN_NS - SECOND))
    assert list(folder.reports(4, WRITTEN_NS)) == [0]
    assert list(folder.reports(4, WRITTEN_NS - SECOND)) == [0, 1]


def test_a_damaged_report_counts_as_none(tmp_path: Path):
    folder = HangFolder(tmp_path)
    folder.write(report(0, [place("router")]))
    (tmp_path / "rank_1.json").write_text('{"rank": 1')
    (tmp_path / "rank_2.json").write_text('{"rank": 2}')
    assert list(folder.reports(4, 0)) == [0]


def test_the_page_is_written_with_a_summary_for_programs(tmp_path: Path):
    folder = HangFolder(tmp_path)
    reports = {0: report(0, [place("router")], world_size=1)}
    text = folder.merge(reports, written_by=0, world_size=1)
    assert folder.page_path.read_text() == text
    summary = json.loads((tmp_path / "report.json").read_text())
    assert summary["suspects"] == [0]
    assert summary["place"] == place("router")._asdict()
    assert summary["headline"] in text
    assert folder.is_merged(0)
    assert not folder.is_merged(folder.page_path.stat().st_mtime_ns + 1)


def test_reports_of_earlier_hangs_are_set_aside_in_numbered_folders(tmp_path: Path):
    folder = HangFolder(tmp_path / "hang")
    folder.set_aside()
    assert not folder.path.exists()
    for number in (1, 2):
        folder.write(report(number, [place("router")]))
        folder.merge({number: report(number, [place("router")])}, written_by=number, world_size=4)
        folder.set_aside()
    folder.set_aside()
    assert sorted(path.name for path in folder.path.iterdir()) == ["1", "2"]
    for number in (1, 2):
        names = sorted(path.name for path in (folder.path / str(number)).iterdir())
        assert names == [f"rank_{number}.json", f"rank_{number}.txt", "report.json", "report.txt"]
