"""The record of a run's starts: why each came about, and when it is better not to start again."""

import json
from pathlib import Path

import pytest

from moe_framework.errors import DataError, ExitCode, RankError, TrainingError
from moe_framework.train.record import RunRecord, deaths_in_a_row, read_starts


class Told:
    """A failure of which the first rank said something."""

    def __init__(self, first: str | None = None):
        self._first = first

    def first(self) -> str | None:
        return self._first


def begin(folder: Path, *, seen: int, step: int = 0, config: str = "a", limit: int = 3) -> RunRecord:
    record = RunRecord(folder, {"git_commit": "abc"})
    record.begin(
        step=step,
        last_step_seen=seen,
        hosts=["n1", "n1", "n2"],
        config_digest=config,
        changed={"optim.lr": [1, 2]} if step else {},
        max_failures_per_step=limit,
        samples_of=lambda step: range(4 * step, 4 * step + 4),
    )
    return record


def reasons(folder: Path) -> list[str]:
    return [start.reason for start in read_starts(folder)]


def report_hang(folder: Path, *, hung: bool) -> None:
    (folder / "hang").mkdir(exist_ok=True)
    (folder / "hang/report.json").write_text(json.dumps({"hung": hung}))


def test_each_start_says_why_it_came_about(tmp_path: Path):
    begin(tmp_path, seen=0).end(ExitCode.STOPPED, step=7)
    begin(tmp_path, seen=7, step=7)  # and is killed
    begin(tmp_path, seen=11, step=9).end(ExitCode.FAILED, step=12, error="ValueError: x")
    begin(tmp_path, seen=12, step=12)
    report_hang(tmp_path, hung=True)
    begin(tmp_path, seen=13, step=12)
    report_hang(tmp_path, hung=False)
    begin(tmp_path, seen=14, step=12).end(ExitCode.DONE, step=20)
    begin(tmp_path, seen=20, step=20)
    assert reasons(tmp_path) == [
        "first start",
        "stopped on request after step 7",
        "the ranks were killed or lost in step 12",
        "failed in step 13: ValueError: x",
        f"hung in step 14; {tmp_path / 'hang'} has the reports",
        "the ranks were killed or lost in step 15",
        "started again after it was done",
    ]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["git_commit"] == "abc"
    assert record["starts"][0]["hosts"] == ["n1", "n2"]
    assert record["starts"][0]["world_size"] == 3
    assert [start["changed"] for start in record["starts"][:2]] == [{}, {"optim.lr": [1, 2]}]


def test_a_step_that_kills_start_after_start_is_named_with_its_batch_and_nothing_is_written(tmp_path: Path):
    for _ in range(3):
        begin(tmp_path, seen=5)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(TrainingError) as error:
        begin(tmp_path, seen=5)
    assert str(error.value).startswith(
        "resilience.max_failures_per_step=3: the last 3 starts all died in step 6, whose batch is samples 24 to 27. "
        "They left no error: killed, or out of memory."
    )
    assert (tmp_path / "run.json").read_bytes() == before
    # The refusal is not forgotten by being repeated, and a higher limit is a way on.
    with pytest.raises(TrainingError):
        begin(tmp_path, seen=5)
    begin(tmp_path, seen=5, limit=4)


def test_the_last_error_is_named(tmp_path: Path):
    for _ in range(2):
        begin(tmp_path, seen=5).end(ExitCode.FAILED, step=5, error="ValueError: bad row")
    with pytest.raises(TrainingError, match="Last error: ValueError: bad row"):
        begin(tmp_path, seen=5, limit=2)


def test_progress_between_failures_another_configuration_and_orderly_ends_start_the_count_again(tmp_path: Path):
    for seen in (5, 6, 5, 6, 5):
        begin(tmp_path, seen=seen, limit=2)
    begin(tmp_path, seen=5, config="b", limit=2)
    assert deaths_in_a_row(read_starts(tmp_path)) == 0
    begin(tmp_path, seen=5, config="b", limit=2).end(ExitCode.STOPPED, step=5)
    begin(tmp_path, seen=5, config="b", limit=2)
    assert deaths_in_a_row(read_starts(tmp_path)) == 0


@pytest.mark.parametrize(
    ("raised", "first", "code", "text"),
    [
        (ValueError("x\ny"), None, ExitCode.FAILED, "ValueError: x"),
        (RuntimeError("connection closed"), "rank 1: ValueError: x", ExitCode.FAILED, "rank 1: ValueError: x"),
        (RankError("rank 1 failed"), "rank 1: ValueError: x", ExitCode.FAILED, "rank 1: ValueError: x"),
        (DataError("data ended"), None, ExitCode.USER_ERROR, "DataError: data ended"),
    ],
)
def test_an_error_ends_the_record_with_what_failed_first(tmp_path: Path, raised, first, code, text):
    record = begin(tmp_path, seen=0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    with pytest.raises(type(raised)), record.ending(Told(first)):  # pyright: ignore[reportArgumentType]
        raise raised
    ended = read_starts(tmp_path)[-1].ended
    assert ended is not None
    assert (ended["code"], ended["step"], ended["error"]) == (code, 2, text)


def test_what_is_interrupted_at_the_keyboard_is_no_failure_of_its_step(tmp_path: Path):
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt), begin(tmp_path, seen=0).ending(Told()):  # pyright: ignore[reportArgumentType]
            raise KeyboardInterrupt
    begin(tmp_path, seen=0)
    assert reasons(tmp_path)[1:] == ["interrupted at the keyboard"] * 3


def test_an_end_that_cannot_be_written_is_a_warning_and_leaves_the_error_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    record = begin(tmp_path, seen=0)
    record._path = tmp_path / "gone/run.json"
    with pytest.raises(DataError), record.ending(Told()):  # pyright: ignore[reportArgumentType]
        raise DataError("data ended")
    assert "gone/run.json: how this start ended is not recorded" in caplog.text


def test_a_record_that_cannot_be_read_is_replaced_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "run.json").write_text('{"git_commit": "an older version"}')
    begin(tmp_path, seen=3)
    assert reasons(tmp_path) == ["first start"]
    assert "earlier starts are not known" in caplog.text


def test_starts_recorded_before_changes_were_are_read(tmp_path: Path):
    begin(tmp_path, seen=0)
    record = json.loads((tmp_path / "run.json").read_text())
    del record["starts"][0]["changed"]
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert [start.changed for start in read_starts(tmp_path)] == [{}]


def test_other_ranks_write_nothing(tmp_path: Path):
    RunRecord(tmp_path, None).end(ExitCode.DONE, step=1)
    assert not list(tmp_path.iterdir())
