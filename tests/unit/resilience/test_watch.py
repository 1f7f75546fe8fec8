"""The watch of one rank, without a process group."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_framework.resilience import watch as watch_module
from moe_framework.resilience.hang_folder import HangFolder
from moe_framework.resilience.watch import HangWatch, Silence
from tests.unit.model.builders import plain_decoder
from tests.unit.resilience.reports import place, report

TIMEOUT_S = 0.3


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "MIN_GRACE_S", 0.4)
    monkeypatch.setattr(watch_module, "LEAVE_AFTER_S", 0.0)


def _watch(folder: Path, rank: int = 0, world_size: int = 1, **options) -> HangWatch:
    return HangWatch(
        **{"directory": folder, "rank": rank, "world_size": world_size, "timeout_s": TIMEOUT_S, "abort": False}
        | options
    )


def _until(condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_silence_is_the_time_since_the_last_sign_of_progress():
    silence, sign = Silence(1.0), object()
    assert [silence.observe(now, sign) for now in (10.0, 11.0, 12.5)] == [0.0, 1.0, 2.5]
    assert silence.observe(13.0, object()) == 0.0


def test_time_in_which_the_observer_was_stopped_is_no_silence():
    silence, sign = Silence(1.0), object()
    silence.observe(10.0, sign)
    assert silence.observe(1000.0, sign) == 2.0
    assert silence.observe(1001.0, sign) == 3.0


def test_a_rank_that_goes_on_is_not_reported(tmp_path: Path):
    with _watch(tmp_path / "hang", timeout_s=1.0) as watch:
        for step in range(30):
            watch.begin_step(step)
            time.sleep(0.05)
    assert not (tmp_path / "hang").exists()


def test_notes_are_progress_too(tmp_path: Path):
    with _watch(tmp_path / "hang", timeout_s=1.0) as watch:
        for _ in range(30):
            watch.note("save")
            time.sleep(0.05)
    assert not (tmp_path / "hang").exists()


def test_a_silent_rank_is_reported_with_its_place(tmp_path: Path, capfd: pytest.CaptureFixture):
    with _watch(tmp_path) as watch:
        watch.begin_step(5)
        watch.note("evaluation")
        assert _until((tmp_path / "report.txt").exists)
    text = (tmp_path / "rank_0.txt").read_text()
    assert "where it is:\n  step 5, evaluation, begins\n" in text
    assert "test_a_silent_rank_is_reported_with_its_place" in text
    printed = capfd.readouterr().err
    assert (
        f"rank 0: no progress for 0.3 s (resilience.hang_timeout_s=0.3); step 5, evaluation, begins; {tmp_path}"
        in printed
    )
    assert f"hang report: {tmp_path / 'report.txt'}\n" in printed


def test_a_hung_rank_ends_with_the_exit_code_of_a_hang_after_the_page_is_there(tmp_path: Path):
    codes: list[tuple[int, bool]] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append((code, (tmp_path / "report.txt").exists()))
        ended.set()

    with _watch(tmp_path, abort=True, end_process=end):
        assert ended.wait(20)
    assert codes == [(76, True)]


def test_a_rank_that_goes_on_while_the_reports_are_merged_is_not_ended(tmp_path: Path):
    codes: list[int] = []
    # It waits for the report of rank 1, which never comes.
    with _watch(tmp_path, world_size=2, abort=True, end_process=codes.append) as watch:
        assert _until((tmp_path / "rank_0.json").exists)
        watch.begin_step(1)
        assert _until((tmp_path / "report.txt").exists)
        assert _until((tmp_path / "1/report.txt").exists)
    assert codes == []


def test_a_rank_whose_work_ends_well_while_it_reports_is_not_ended(tmp_path: Path):
    codes: list[int] = []
    with _watch(tmp_path, world_size=2, abort=True, end_process=codes.append):
        assert _until((tmp_path / "rank_0.json").exists)
    assert (tmp_path / "report.txt").exists()
    assert codes == []


def test_a_second_hang_does_not_mix_with_the_first(tmp_path: Path):
    with _watch(tmp_path) as watch:
        watch.begin_step(1)
        assert _until((tmp_path / "report.txt").exists)
        watch.begin_step(2)
        assert _until((tmp_path / "1/report.txt").exists)
        assert _until((tmp_path / "report.txt").exists)
    assert "step 1, begins" in (tmp_path / "1/report.txt").read_text()
    assert "step 2, begins" in (tmp_path / "report.txt").read_text()


def test_reports_of_the_start_before_are_set_aside_by_rank_0(tmp_path: Path):
    HangFolder(tmp_path).write(report(1, [place("router")]))
    with _watch(tmp_path, rank=1, world_size=2, timeout_s=60.0):
        assert (tmp_path / "rank_1.txt").exists()
    with _watch(tmp_path, rank=0, world_size=2, timeout_s=60.0):
        assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_all_ranks_that_report_are_on_the_page(tmp_path: Path):
    with _watch(tmp_path, 1, 2), _watch(tmp_path, 0, 2):
        assert _until((tmp_path / "report.txt").exists)
        time.sleep(0.1)
    assert "Hang report of 2 of 2 ranks" in (tmp_path / "report.txt").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["written_by"] == 0


def test_without_rank_0_the_lowest_rank_that_reports_merges(tmp_path: Path):
    with _watch(tmp_path, 2, 3), _watch(tmp_path, 1, 3):
        assert _until((tmp_path / "report.txt").exists)
    page = (tmp_path / "report.txt").read_text()
    assert "Hang report of 2 of 3 ranks" in page
    assert "  0: no report: stopped, dead, or its interpreter is blocked\n" in page
    assert json.loads((tmp_path / "report.json").read_text())["written_by"] == 1


def test_an_error_of_a_collective_leaves_a_report(tmp_path: Path):
    error = RuntimeError("[/x/gloo/transport/tcp/pair.cc:538] Read error")
    with pytest.raises(RuntimeError, match="gloo"), _watch(tmp_path, 1, 2, timeout_s=60.0):
        raise error
    text = (tmp_path / "rank_1.txt").read_text()
    assert "ended by RuntimeError: [/x/gloo/transport/tcp/pair.cc:538] Read error" in text
    assert "  traceback of RuntimeError\n" in text
    assert "  0: no report" in (tmp_path / "report.txt").read_text()


def test_other_errors_leave_no_report(tmp_path: Path):
    with pytest.raises(RuntimeError, match="memory"), _watch(tmp_path / "hang", timeout_s=60.0):
        raise RuntimeError("out of memory")
    assert not (tmp_path / "hang").exists()


def test_a_report_that_cannot_be_written_is_printed_and_the_rank_still_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture
):
    (tmp_path / "file").write_text("")
    ended = threading.Event()
    with _watch(tmp_path / "file", abort=True, end_process=lambda _: ended.set()) as watch:
        watch.begin_step(9)
        assert ended.wait(20)
    assert "the report that could not be written:\nrank 0 of 1" in capfd.readouterr().err


def test_a_timeout_of_0_watches_nothing(tmp_path: Path):
    model = plain_decoder()
    dispatcher = model.layers[0].moe.dispatcher  # pyright: ignore
    threads = threading.active_count()
    with _watch(tmp_path / "hang", timeout_s=0.0) as watch:
        watch.attach(model)
        watch.begin_step(1)
        assert model.layers[0].moe.dispatcher is dispatcher  # pyright: ignore
        assert threading.active_count() == threads


def test_the_block_leaves_model_and_threads_as_they_were(tmp_path: Path):
    model = plain_decoder()
    dispatcher = model.layers[0].moe.dispatcher  # pyright: ignore
    threads = threading.active_count()
    watch = _watch(tmp_path, timeout_s=60.0)
    watch.attach(model)
    with watch:
        assert model.layers[0].moe.dispatcher is not dispatcher  # pyright: ignore
    assert model.layers[0].moe.dispatcher is dispatcher  # pyright: ignore
    assert threading.active_count() == threads
