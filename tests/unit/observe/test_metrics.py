import contextlib
import json
import math
from pathlib import Path

import pytest

from moe_framework.observe.metrics import MetricsWriter, last_step, write_json_atomic
from tests.helpers.mounts import small_disk


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write_steps(path: Path, resume_step: int | None, steps: range) -> None:
    with MetricsWriter(path, resume_step) as writer:
        for step in steps:
            writer.write(step, {"loss": 1.0 / step})


def test_a_line_is_on_disk_before_the_file_is_closed(tmp_path: Path):
    writer = MetricsWriter(tmp_path / "m.jsonl", None)
    writer.write(1, {"loss": 0.5, "num_tokens": 7})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "loss": 0.5, "num_tokens": 7}
    writer.close()


def test_resume_drops_the_steps_that_are_repeated(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    write_steps(path, None, range(1, 8))
    write_steps(path, 4, range(5, 7))
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]


def test_resume_at_step_zero_starts_over(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    write_steps(path, None, range(1, 4))
    write_steps(path, 0, range(1, 3))
    assert steps_in(path) == [1, 2]


def test_a_new_run_starts_an_empty_file(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    write_steps(path, None, range(1, 4))
    write_steps(path, None, range(1, 2))
    assert steps_in(path) == [1]


def test_resume_without_a_file_starts_one(tmp_path: Path):
    write_steps(tmp_path / "m.jsonl", 3, range(4, 6))
    assert steps_in(tmp_path / "m.jsonl") == [4, 5]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "loss": 1.0}', "\0\0\0", '{"step"\n'])
def test_a_last_line_cut_off_by_a_kill_is_removed(tmp_path: Path, torn: str):
    path = tmp_path / "m.jsonl"
    write_steps(path, None, range(1, 3))
    path.write_text(path.read_text() + torn)
    write_steps(path, 5, range(6, 7))
    assert steps_in(path) == [1, 2, 6]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', ""])
def test_an_ordinary_end_keeps_no_copy(tmp_path: Path, torn: str, caplog):
    path = tmp_path / "m.jsonl"
    write_steps(path, None, range(1, 3))
    path.write_text(path.read_text() + torn)
    write_steps(path, 5, range(6, 7))
    assert list(tmp_path.iterdir()) == [path]
    assert caplog.text == ""


@pytest.mark.parametrize("bad", ["not json", '{"loss": 1.0}', "[1]", '{"step": "x"}', '{"step": 1}', "\0\0", ""])
def test_a_damaged_file_is_kept_aside_and_its_good_lines_go_on(tmp_path: Path, bad: str, caplog):
    path, kept = tmp_path / "m.jsonl", tmp_path / "m.damaged.1.jsonl"
    content = '{"step": 1}\n' + bad + '\n{"step": 3}\n{"step": 4}\n'
    path.write_text(content)
    write_steps(path, 3, range(4, 6))
    assert steps_in(path) == [1, 3, 4, 5]
    assert kept.read_text() == content
    assert "m.jsonl: line 2 is not" in caplog.text
    assert "kept as m.damaged.1.jsonl" in caplog.text


def test_a_second_damaged_file_does_not_replace_the_first(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    for number in (1, 2):
        path.write_text(f'bad {number}\n{{"step": 1}}\n')
        write_steps(path, 1, range(2, 3))
    assert [(tmp_path / f"m.damaged.{n}.jsonl").read_text()[:5] for n in (1, 2)] == ["bad 1", "bad 2"]


def test_a_line_separator_inside_of_a_value_does_not_end_the_line(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, None) as writer:
        writer.write(1, {"text": "one\u2028two\x85"})
    write_steps(path, 1, range(2, 3))
    with path.open(newline="\n") as file:
        assert [json.loads(line)["step"] for line in file] == [1, 2]


def test_a_number_that_comes_later_never_goes_into_another_writers_line(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, None) as writer:
        writer.write(1, {}, later=["x"])
        with path.open("a") as file:
            file.write('{"step": 2, "loss": 0.5}\n')
        writer.fill(1, "x", 7.0)
        assert [json.loads(line) for line in path.read_text().splitlines()] == [
            {"step": 1, "x": 7.0},
            {"step": 2, "loss": 0.5},
        ]
        writer.write(3, {}, later=["x"])
        with MetricsWriter(path, None) as other:
            other.write(1, {"loss": 0.25}, later=["x"])
            writer.fill(3, "x", 7.0)
    assert json.loads(path.read_text()) == {"step": 1, "loss": 0.25, "x": None}


@pytest.mark.parametrize("end", ["", "\0\0\n\0", '{"step": 3, "lo', "bad\n[]\n"])
def test_the_last_step_is_that_of_the_last_good_line(tmp_path: Path, end: str):
    assert last_step(tmp_path / "m.jsonl") == 0
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"step": 2}\n' + end)
    assert last_step(tmp_path / "m.jsonl") == 2


def test_a_step_is_never_written_twice(tmp_path: Path):
    write_steps(tmp_path / "m.jsonl", None, range(1, 4))
    with MetricsWriter(tmp_path / "m.jsonl", 3) as writer, pytest.raises(AssertionError, match="step 3 after step 3"):
        writer.write(3, {})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_become_null_at_any_depth(tmp_path: Path, value: float):
    with MetricsWriter(tmp_path / "m.jsonl", None) as writer:
        writer.write(1, {"loss": value, "by_layer": [1.0, {"deep": value}]})
    written = json.loads((tmp_path / "m.jsonl").read_text())
    assert written == {"step": 1, "loss": None, "by_layer": [1.0, {"deep": None}]}


def test_json_file_is_replaced_whole_and_leaves_no_temporary(tmp_path: Path):
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"loss": 1.5})
    write_json_atomic(path, {"loss": math.nan, "name": "ü"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"loss": None, "name": "ü"}
    assert list(tmp_path.iterdir()) == [path]


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"loss": 1.5})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"loss": object()})
    assert json.loads(path.read_text()) == {"loss": 1.5}
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_replacement_leaves_no_temporary(tmp_path: Path):
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(IsADirectoryError):
        write_json_atomic(tmp_path / "summary.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_number_that_comes_later_is_in_the_line_of_its_step_at_the_same_length(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, None) as writer:
        writer.write(1, {"loss": 0.5})
        writer.write(2, {"loss": 0.25}, later=["save_stall_ms"])
        before = path.read_bytes()
        assert [json.loads(line) for line in before.splitlines()][1] == {"step": 2, "loss": 0.25, "save_stall_ms": None}
        writer.fill(1, "save_stall_ms", 7.0)
        assert path.read_bytes() == before
        writer.fill(2, "save_stall_ms", 1234.5678)
        writer.write(3, {"loss": 0.125})
        writer.fill(2, "save_stall_ms", 9.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25, "save_stall_ms": 1234.57}, lines[2]]
    assert lines[2] == {"step": 3, "loss": 0.125}
    assert path.read_bytes().index(b'{"step": 3') == len(before)


@pytest.mark.parametrize("value", [0.0, 1e-9 / 3, 1e21 / 3, 12345678.9])
def test_every_number_fits_the_place_left_for_it(tmp_path: Path, value: float):
    with MetricsWriter(tmp_path / "m.jsonl", None) as writer:
        writer.write(1, {}, later=["x"])
        writer.fill(1, "x", value)
    assert json.loads((tmp_path / "m.jsonl").read_text())["x"] == pytest.approx(value, rel=1e-5)


def test_lines_that_a_full_disk_does_not_take_are_written_when_there_is_room(tmp_path: Path, caplog):
    with small_disk(tmp_path / "disk", num_bytes=64 * 1024) as disk:
        path, ballast = disk / "m.jsonl", disk / "ballast"
        with MetricsWriter(path, None) as writer:
            writer.write(1, {"text": "x" * 3000})
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            for step in (2, 3, 4):
                writer.write(step, {"text": "x" * 3000}, later=["stall"])
                writer.fill(step, "stall", 1.0)
            # The first page of the file had room for a part of a line.
            assert b'{"step": 2' in path.read_bytes()
            assert not path.read_bytes().endswith(b"\n")
            assert caplog.text.count("No space left on device") == 1
            ballast.unlink()
            writer.write(5, {"text": "y"}, later=["stall"])
            writer.fill(5, "stall", 2.0)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
        assert [line.get("stall") for line in lines] == [None, None, None, None, 2.0]
        assert [line["text"] for line in lines] == ["x" * 3000] * 4 + ["y"]
