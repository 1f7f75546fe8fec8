"""What the command refuses: with the file, the place, the rule and the remedy, and nothing is left of the output."""

import gzip
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="needs the hf extra")

from tests.unit.tools.text_files import documents_of, make_tokenizer, outputs, run, write_jsonl
from tools.command_line import INTERRUPTED_EXIT_CODE
from tools.preparation import documents, prepare
from tools.preparation.tokenizer import TextTokenizer
from tools.prepare_text import main

GOOD = b'{"text": "good"}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path / "tokenizer")
    return tmp_path


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    def check(*arguments: str | Path, kind: str = "DataError") -> str:
        before = outputs(folder)
        assert run(folder, *arguments) == 2
        assert outputs(folder) == before
        (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("tokenizing")]
        assert line.startswith(f"{kind}: ")
        return line

    return check


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', ", line 3: not JSON (Expecting ',' delimiter, column 13). Correct or remove the line."),
        (b"[" * 100_000, ", line 3: not JSON ("),
        (b'["text"]', ', line 3: not a JSON object. Each line is one, such as {"text": …}.'),
        (
            b'{"body": "a", "id": 1}',
            "--field=text: missing in {path}, line 3, which has: body, id. Name the text's field.",
        ),
        (b"{}", "--field=text: missing in {path}, line 3, which has: none. "),
        (
            b'{"text": null}',
            "--field=text: no string in {path}, line 3, but NoneType. Correct or remove the line, or name",
        ),
        (b'{"text": "\\ud800"}', ", line 3: half a surrogate pair at character 0, which is no text. Correct the text."),
        (b'{"text": "\xe9"}', ", line 3: not UTF-8 (byte 10, "),
    ],
)
def test_a_bad_line_is_named(folder: Path, refused, line: bytes, message: str):
    path = folder / "a.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD)
    assert message.format(path=path) in refused(path) if "{path}" in message else f"{path}{message}" in refused(path)


def test_a_bad_line_of_a_compressed_file_is_named(folder: Path, refused):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(GOOD + b"x\n"))
    assert f"{folder}/a.jsonl.gz, line 2: not JSON (" in refused(folder / "a.jsonl.gz")


@pytest.mark.parametrize("content", [gzip.compress(GOOD * 9)[:-12], b"plain", gzip.compress(GOOD)[:-8] + b"12345678"])
def test_a_damaged_gz_file_is_named(folder: Path, refused, content: bytes):
    (folder / "a.jsonl.gz").write_bytes(content)
    assert f"{folder}/a.jsonl.gz: damaged or incomplete (" in refused(folder / "a.jsonl.gz")


def test_a_damaged_zst_file_is_named(folder: Path, refused):
    zstd = pytest.importorskip("backports.zstd")
    for content in (zstd.compress(GOOD)[:-3], b"plain"):
        (folder / "a.jsonl.zst").write_bytes(content)
        assert f"{folder}/a.jsonl.zst: damaged or incomplete (" in refused(folder / "a.jsonl.zst")


def test_a_text_file_that_is_not_utf_8_is_named(folder: Path, refused):
    (folder / "a.txt").write_bytes(b"12 \xe9")
    assert f"{folder}/a.txt: not UTF-8 (byte 3, " in refused(folder / "a.txt")


def test_too_long_a_document_is_named(folder: Path, refused, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 10)
    (folder / "a.txt").write_text("12345678901")
    assert "more than 10 bytes, and a .txt file is one document. Split it, or give --lines" in refused(folder / "a.txt")
    path = write_jsonl(folder / "a.jsonl", ["1234567890", "ééééé€"])
    assert f"{path}, line 2: 13 bytes; a document has at most 10. Split the document." in refused(path)
    path.write_text("x" * 81)
    assert f"{path}, line 1: longer than 80 bytes. Split the document." in refused(path)
    assert run(folder, write_jsonl(folder / "b.jsonl", ["1234567890", "ééééé"])) == 0


def test_inputs_that_are_none_are_named(folder: Path, refused):
    (folder / "empty").mkdir()
    (folder / "a.json").touch()
    (folder / "a.parquet.gz").touch()
    source = write_jsonl(folder / "a.jsonl", ["a"])
    assert f"{folder}/empty: a folder without text. Give .jsonl, .txt or .parquet" in refused(folder / "empty")
    assert f"{folder}/none.jsonl: no such file. Give" in refused(folder / "none.jsonl")
    for name in ("a.json", "a.parquet.gz"):
        assert f"{folder}/{name}: its name says no known format. Give" in refused(folder / name)
    assert f"{folder}/empty/../a.jsonl: given twice. Give it once" in refused(
        source, folder / "empty" / ".." / "a.jsonl"
    )


def test_inputs_without_a_document_are_refused(folder: Path, refused):
    (folder / "a.jsonl").write_text("\n")
    assert "out: no document with a token was added (0 were empty). Give some text." in refused(folder / "a.jsonl")


def test_bad_parquet_is_named(folder: Path, refused):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = folder / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", None], "id": [1, 2]}), path)
    assert f"--field=text: null in {path}, row 2. Correct or remove the row." in refused(path)
    assert f"--field=body: missing in {path}, which has: text, id. Name" in refused(path, "--field", "body")
    assert f"--field=id: int64 in {path}, not string. Name the text's column." in refused(path, "--field", "id")
    path.write_bytes(path.read_bytes()[:-20])
    assert f"{path}: not Parquet, or damaged (" in refused(path)


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("pyarrow", "a.parquet", "a.parquet: reading .parquet needs pyarrow, which failed to import ("),
        ("backports", "a.jsonl.zst", "a.jsonl.zst: reading .zst needs backports.zstd, which failed to import ("),
        ("tokenizers", "a.txt", "tokenizer needs the tokenizers library, which failed to import ("),
    ],
)
def test_a_missing_package_is_named(
    folder: Path, refused, module: str, name: str, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, module, None)
    (folder / name).write_text("text")
    line = refused(folder / name, kind="DependencyError")
    assert message in line
    assert "Install " in line


def tokenizer_error(folder: Path, capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> str:
    source = write_jsonl(folder / "a.jsonl", ["a"])
    assert main(["--tokenizer", str(path), "--output", str(folder / "out"), str(source), *options]) == 2
    assert outputs(folder) == []
    return capsys.readouterr().err


def test_a_tokenizer_that_is_none_is_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    other = folder / "other"
    other.mkdir()
    assert f"--tokenizer={folder}/no: no such file or folder. Give a" in tokenizer_error(folder, capsys, folder / "no")
    assert f"--tokenizer={other}: a folder without tokenizer.json. Give a" in tokenizer_error(folder, capsys, other)
    (other / "tokenizer.model").touch()
    message = tokenizer_error(folder, capsys, other)
    assert f"--tokenizer={other}: tokenizer.model alone, which is SentencePiece's. Make tokenizer.json of it" in message
    for content in (b"{}", b"\xff", b"[]"):
        (other / "tokenizer.json").write_bytes(content)
        message = tokenizer_error(folder, capsys, other)
        assert f"--tokenizer={other}/tokenizer.json: " in message
        assert "Give a Hugging Face folder with tokenizer.json, or that file." in message


def test_a_tokenizer_that_draws_at_random_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    path = make_tokenizer(folder / "random", model={"dropout": 0.1})
    assert "tokenizer.json: dropout=0.1 draws tokens at random. Set it" in tokenizer_error(folder, capsys, path)


def test_an_unknown_bos_or_eos_is_named(folder: Path, refused):
    source = write_jsonl(folder / "a.jsonl", ["a"])
    for option in ("--bos", "--eos"):
        message = f"{option}=<x>: no token of the tokenizer. Give one that it has, such as <s>, </s>, <|im_end|>."
        assert message in refused(source, option, "<x>")


def test_without_a_known_end_one_must_be_given(folder: Path, capsys: pytest.CaptureFixture[str], refused):
    tokenizer = folder / "tokenizer"
    source = write_jsonl(folder / "a.jsonl", ["a"])
    give = "Give --eos=TOKEN, or --no-eos to store documents without one."
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert f"config.json in {tokenizer} says which token ends a document. {give}" in refused(source)
    for value, shown in (([256, 257], "[256, 257]"), (999, "999"), ([], "[]")):
        (tokenizer / "config.json").write_text(json.dumps({"eos_token_id": value}))
        assert f"config.json: eos_token_id={shown} is not one token of the tokenizer. {give}" in refused(source)
    (tokenizer / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    assert 'tokenizer_config.json: eos_token="<gone>" is not one token' in refused(source)
    for content in ("{", "[]"):
        (tokenizer / "tokenizer_config.json").write_text(content)
        assert f"{tokenizer}/tokenizer_config.json: not a JSON " in refused(source)
    alone = tokenizer.joinpath("tokenizer.json").rename(folder / "alone.json")
    message = tokenizer_error(folder, capsys, alone)
    assert f"--eos: a tokenizer without its folder does not say which token ends a document. {give}" in message


def test_a_document_that_the_tokenizer_cannot_encode_is_named(folder: Path, refused):
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(content))
    source = write_jsonl(folder / "a.jsonl", ["a", "a b"])
    message = refused(source, "--no-eos")
    assert f"{source}, line 2: the tokenizer cannot encode it (" in message
    assert message.endswith("Correct or remove the document.")


def test_existing_output_is_refused_before_anything_is_read(folder: Path, refused):
    (folder / "out.idx").write_text("mine")
    assert "out.idx: exists, and is not overwritten." in refused(folder / "none.jsonl")
    assert (folder / "out.idx").read_text() == "mine"


def test_overwriting_keeps_the_old_files_until_the_new_ones_are_complete(folder: Path, refused):
    assert run(folder, write_jsonl(folder / "a.jsonl", ["old"])) == 0
    before = {path: path.read_bytes() for path in folder.glob("out*")}
    (folder / "b.jsonl").write_bytes(GOOD + b"x\n")
    refused(folder / "b.jsonl", "--overwrite")
    assert {path: path.read_bytes() for path in folder.glob("out*")} == before
    assert run(folder, write_jsonl(folder / "b.jsonl", ["new", "er"]), "--overwrite") == 0
    assert len(documents_of(folder / "out")) == 2


def test_an_interruption_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*_: object) -> None:
        assert outputs(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "_describe", interrupted)
    assert run(folder, write_jsonl(folder / "a.jsonl", ["a"] * 10)) == INTERRUPTED_EXIT_CODE
    assert outputs(folder) == []
    assert capsys.readouterr().err == "Interrupted: nothing was left behind.\n"


def test_an_error_within_a_thread_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TextTokenizer, "encode", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(folder, write_jsonl(folder / "a.jsonl", ["a"] * 10))
    assert outputs(folder) == []


def test_a_report_that_cannot_be_written_is_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    source = write_jsonl(folder / "a.jsonl", ["a"])
    assert run(folder, source, "--json", folder / "none" / "x.json") == 2
    assert f"--json={folder}/none/x.json: cannot be written (No such file or directory)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [["a.txt"], ["--no-eos", "--eos", "x", "a.txt"], ["--workers", "0", "a.txt"], ["--limit", "-1", "a.txt"], []],
)
def test_a_wrong_command_line_is_refused(folder: Path, line: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(line) if line == ["a.txt"] else run(folder, *line)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err
