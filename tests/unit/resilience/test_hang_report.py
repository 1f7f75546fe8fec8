"""One rank's report."""

import json
import threading
import time
from dataclasses import replace

import pytest

from moe_framework.resilience import hang_report
from moe_framework.resilience.hang_report import from_json, ranges, report_of, stacks_of_threads, to_json, to_text
from moe_framework.resilience.marks import TRAINING, Exchange, MarkLog
from tests.unit.resilience.reports import EP01, SAVER, SECOND, WORLD4, WRITTEN_NS, collective, place, report


def test_a_report_survives_json():
    events = [place("dispatch"), (EP01, 5, "all_to_all", False), place("block", None, phase="")]
    one = replace(
        report(1, events, groups=(WORLD4, EP01), frame="x.py:1 in f"), exchange=Exchange(place("dispatch"), [1], [2])
    )
    assert from_json(json.loads(json.dumps(to_json(one)))) == one


@pytest.mark.parametrize("damage", [{}, {"rank": 1}, None])
def test_other_json_is_refused(damage):
    with pytest.raises((ValueError, TypeError, LookupError)):
        from_json(damage)


def test_the_text_has_places_collectives_exchange_and_stacks():
    events = [
        place("dispatch", 0),
        (EP01, 4, "all_to_all", True),
        place("dispatch"),
        (EP01, 5, "all_to_all", False, (2, 4), "Long"),
        (WORLD4, 9, "all_gather", False, (1,), "Byte", SAVER),
    ]
    one = replace(
        report(1, events, groups=(WORLD4, EP01), frame="x.py:1 in f"),
        exchange=Exchange(place("dispatch", 0), [3, 4], [5, 6]),
    )
    text = to_text(one)
    here, before = (
        "step 3, micro-batch 1, layer 1, forward, dispatch",
        "step 3, micro-batch 1, layer 0, forward, dispatch",
    )
    assert text.startswith("rank 1 of 4, host host, process 101, 2023-11-14T22:13:20+00:00\nno progress for 5.0 s\n")
    assert f"where it is:\n  {here}\n  last dispatch that ended: {before}\n" in text
    assert (
        "    token copies sent to each expert rank: [3, 4]\n    token copies received from each:       [5, 6]\n" in text
    )
    assert (
        "collectives that it has begun and not finished:\n"
        f"       6.0 s ago: #5 all_to_all Long [2, 4] of mesh_ep (ranks 0-1); {here}\n"
        "       5.0 s ago: #9 all_gather Byte [1] of default_pg (ranks 0-3); "
        "in the background, or before the marks below\n"
    ) in text
    assert (
        f"finished collectives:\n       8.0 s ago: #4 all_to_all Float [4, 8] of mesh_ep (ranks 0-1); {before}\n"
        in text
    )
    assert f"       9.000 s  {before}\n       7.000 s  {here}\n" in text
    assert text.endswith("innermost call last:\n  MainThread\n    x.py:1 in f\n")


def test_collectives_belong_to_the_mark_before_them():
    one = report(0, [place("dispatch"), (EP01, 5, "all_to_all", False), place("experts")])
    assert one.place_of(one.collectives[0]) == place("dispatch")
    early = collective(one.marks[0].time_ns - SECOND, EP01, 4, "all_to_all", True)
    assert one.place_of(early) is None
    assert one.place_of(replace(one.collectives[0], thread=SAVER)) is None


def test_stacks_are_of_all_threads_and_the_main_thread_is_first():
    waiting, stop = threading.Event(), threading.Event()

    def waits_in_a_function() -> None:
        waiting.set()
        stop.wait(30)

    other = threading.Thread(target=waits_in_a_function, name="other")
    other.start()
    found: list = []
    try:
        assert waiting.wait(30)
        observer = threading.Thread(target=lambda: found.extend(stacks_of_threads()), name="observer")
        observer.start()
        observer.join()
    finally:
        stop.set()
        other.join()
    assert found[0].name == "MainThread"
    assert any("test_stacks_are_of_all_threads" in frame for frame in found[0].frames)
    names = {stack.name: stack for stack in found}
    assert "observer" not in names
    assert any(f"{__file__}:" in frame and "waits_in_a_function" in frame for frame in names["other"].frames)


def test_after_an_error_its_traceback_is_the_stack():
    log = MarkLog()
    with pytest.raises(ZeroDivisionError) as caught:
        _fails()
    first, *_ = report_of(log, rank=0, world_size=1, reason="", error=caught.value).stacks
    assert first.name == "traceback of ZeroDivisionError"
    assert first.frames[-1].endswith("in _fails")


def _fails() -> float:
    return 1 / 0


def test_the_line_of_the_package_is_shown_not_that_of_torch():
    stack = hang_report.ThreadStack(
        "", 1, ["/a/moe_framework/x.py:1 in f", "/a/moe_framework/y.py:2 in g", "/t/torch.py:3 in h"]
    )
    assert stack.own_frame == "/a/moe_framework/y.py:2 in g"
    assert hang_report.ThreadStack("", 1, ["/t/torch.py:3 in h"]).own_frame == ""


def test_collectives_from_before_the_log_are_left_out(monkeypatch: pytest.MonkeyPatch):
    log = MarkLog()
    log.enter(TRAINING, 1)
    old, new = (collective(time_ns, WORLD4, 1, "all_reduce", False) for time_ns in (WRITTEN_NS, time.time_ns()))
    monkeypatch.setattr(hang_report, "recorded", lambda: ([old, new], ""))
    assert report_of(log, rank=0, world_size=1, reason="").collectives == [new]


def test_ranks_are_shown_in_short():
    assert ranges([3, 0, 1, 7, 8, 5]) == "0-1, 3, 5, 7-8"
    assert ranges([]) == ""
