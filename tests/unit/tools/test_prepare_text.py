"""What the command makes of text; what it refuses is in test_prepare_text_errors.py."""

import gzip
import hashlib
import io
import json
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("tokenizers", reason="needs the hf extra")

from moe_framework.config.load import parse_command_line
from moe_framework.data.sources import Cut, open_data
from moe_framework.distributed.runtime import LaunchEnvironment
from tests.unit.tools.text_files import (
    BOS,
    EOS,
    VOCAB_SIZE,
    documents_of,
    make_tokenizer,
    outputs,
    run,
    tokens_of,
    write_jsonl,
)
from tools.preparation import pipeline, prepare
from tools.preparation.documents import Document, Reader
from tools.preparation.inputs import find_inputs
from tools.preparation.progress import TextProgress
from tools.preparation.tokenizer import Encoded, TextTokenizer, load_tokenizer
from train_fsdp2_ep import load_valid_config

ROOT = Path(__file__).parents[3]
CUT_KEYS = ("seq_length", "stride", "reverse_complement", "separate_documents")
TEXTS = ["The cat sat.", "é 漢字 🙂\n\tend", "a", "x" * 50]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def expected(texts: list[str]) -> list[list[int]]:
    return [[*tokens_of(text), EOS] for text in texts]


def test_each_document_is_its_texts_tokens_and_the_end(folder: Path):
    assert run(folder, write_jsonl(folder / "a.jsonl", TEXTS)) == 0
    assert documents_of(folder / "out") == expected(TEXTS)
    assert outputs(folder) == ["out.bin", "out.idx", "out.json"]


def test_bos_and_eos_are_those_asked_for(folder: Path):
    source = write_jsonl(folder / "a.jsonl", ["ab", "c"])
    for options, before, after in (
        (("--no-eos",), [], []),
        (("--bos", "<s>"), [BOS], [EOS]),
        (("--bos", "<s>", "--no-eos"), [BOS], []),
        (("--eos", "<|im_end|>"), [], [258]),
    ):
        assert run(folder, source, *options, "--overwrite") == 0
        assert documents_of(folder / "out") == [[*before, *tokens_of(text), *after] for text in ("ab", "c")]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_order_is_that_of_the_inputs_with_any_number_of_workers(
    folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pipeline, "_BATCH_CHARACTERS", 200)
    texts = [f"{index} " * (1 + index * 7 % 31) for index in range(120)]
    second = write_jsonl(folder / "b.jsonl", texts[:50])
    first = write_jsonl(folder / "c.jsonl", texts[50:])
    assert run(folder, second, first, "--workers", str(workers)) == 0
    assert documents_of(folder / "out") == expected(texts)


def test_threads_work_at_the_same_time_and_little_is_read_ahead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pipeline, "_BATCH_CHARACTERS", 1)
    meeting = threading.Barrier(3, timeout=20)
    num_read, most_ahead, num_encoded = 0, 0, 0

    class Meeting(TextTokenizer):
        def __init__(self):
            pass

        def encode(self, document: Document) -> Encoded:
            meeting.wait()
            return Encoded([document.text], 0, 0)  # pyright: ignore[reportArgumentType]

    def documents():
        nonlocal num_read
        for num_read in range(1, 31):
            yield Document(str(num_read), "")

    for batch in pipeline.encode_in_order(documents(), Meeting(), 3):
        num_encoded += len(batch.documents)
        assert batch.documents[0].tokens == [str(num_encoded)]
        most_ahead = max(most_ahead, num_read - num_encoded)
    assert num_encoded == 30
    assert most_ahead <= 6


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "A.JSONL.GZ"])
def test_jsonl_is_read_plain_and_compressed(folder: Path, name: str):
    content = write_jsonl(folder / "plain", TEXTS).read_bytes()
    if name.lower().endswith(".gz"):
        # Two members, as `cat` of two files makes them.
        content = gzip.compress(content[:50]) + gzip.compress(content[50:])
    if name.endswith(".zst"):
        content = pytest.importorskip("backports.zstd").compress(content)
    (folder / name).write_bytes(content)
    assert run(folder, folder / name) == 0
    assert documents_of(folder / "out") == expected(TEXTS)


def test_field_blank_lines_mark_and_windows_line_ends(folder: Path):
    source = folder / "a.jsonl"
    source.write_bytes('\ufeff{"body": "a\\nb\u2028c"}\r\n\r\n  \n{"body": "d", "text": 3}'.encode())
    assert run(folder, source, "--field", "body") == 0
    assert documents_of(folder / "out") == expected(["a\nb\u2028c", "d"])


def test_a_text_file_is_one_document_or_one_a_line(folder: Path):
    source = folder / "a.txt"
    source.write_bytes(b"one\r\ntwo\n\n  three \n")
    assert run(folder, source) == 0
    assert documents_of(folder / "out") == expected(["one\r\ntwo\n\n  three \n"])
    assert run(folder, source, "--lines", "--overwrite") == 0
    assert documents_of(folder / "out") == expected(["one", "two", "  three "])


def test_a_folders_files_are_read_in_sorted_order(folder: Path):
    corpus = folder / "corpus"
    (corpus / "b").mkdir(parents=True)
    (corpus / ".cache").mkdir()
    write_jsonl(corpus / "c.jsonl", ["third"])
    write_jsonl(corpus / "a.jsonl", ["first"])
    (corpus / "b" / "1.txt").write_text("second")
    write_jsonl(corpus / ".cache" / "x.jsonl", ["hidden"])
    (corpus / "notes.md").write_text("no")
    assert run(folder, corpus) == 0
    assert documents_of(folder / "out") == expected(["first", "second", "third"])
    inputs = json.loads((folder / "out.json").read_text())["inputs"]
    assert [file["name"] for file in inputs] == ["corpus/a.jsonl", "corpus/b/1.txt", "corpus/c.jsonl"]


def test_parquet_is_read(folder: Path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"row {row}" for row in range(600)]
    column = pyarrow.array(texts)
    for stored in (column, column.cast(pyarrow.large_string()), column.dictionary_encode()):
        parquet.write_table(pyarrow.table({"id": range(600), "text": stored}), folder / "a.parquet", row_group_size=250)
        assert run(folder, folder / "a.parquet", "--overwrite") == 0
        assert documents_of(folder / "out") == expected(texts)


def test_documents_without_a_token_are_left_out_and_said(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert run(folder, write_jsonl(folder / "a.jsonl", ["", "a", ""]), "--bos", "<s>") == 0
    assert documents_of(folder / "out") == [[BOS, *tokens_of("a"), EOS]]
    assert "left out: 2 documents without a token" in capsys.readouterr().out


def test_limit_reads_the_first_documents_only(folder: Path):
    source = folder / "a.jsonl"
    source.write_text(write_jsonl(folder / "b.jsonl", TEXTS[:2]).read_text() + "not JSON\n")
    assert run(folder, source, "--limit", "2") == 0
    assert documents_of(folder / "out") == expected(TEXTS[:2])


def test_truncation_and_padding_of_the_tokenizer_are_off(folder: Path):
    make_tokenizer(
        folder / "tokenizer",
        truncation={"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        padding={
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
    )
    assert run(folder, write_jsonl(folder / "a.jsonl", TEXTS)) == 0
    assert documents_of(folder / "out") == expected(TEXTS)


def test_the_end_of_a_document_within_a_text_is_said(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert run(folder, write_jsonl(folder / "a.jsonl", ["a</s>b</s>", "c"])) == 0
    assert documents_of(folder / "out")[0] == [*tokens_of("a"), EOS, *tokens_of("b"), EOS, EOS]
    assert "note: the text of 1 documents has </s>, which was read as that token" in capsys.readouterr().out


def test_tokens_for_unknown_text_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]):
    words = {"type": "WordLevel", "vocab": {"?": 0, "a": 1}, "unk_token": "?"}
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(content))
    assert run(folder, write_jsonl(folder / "x.jsonl", ["a b a", "c"]), "--eos", "a") == 0
    assert documents_of(folder / "out") == [[1, 0, 1, 1], [0, 1]]
    assert "note: 2 tokens stand for text that the tokenizer does not know" in capsys.readouterr().out


def test_the_folder_says_which_token_ends_a_document(folder: Path):
    tokenizer = folder / "tokenizer"
    (tokenizer / "tokenizer_config.json").unlink()
    for name, content, token in (
        ("config.json", {"eos_token_id": 256}, "<s>"),
        ("generation_config.json", {"eos_token_id": [258]}, "<|im_end|>"),
        ("special_tokens_map.json", {"eos_token": {"content": "</s>"}}, "</s>"),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}, "<|im_end|>"),
    ):
        (tokenizer / name).write_text(json.dumps(content))
        eos = load_tokenizer(tokenizer).eos
        assert eos is not None
        assert (eos.token, eos.origin) == (token, name)
        assert load_tokenizer(tokenizer / "tokenizer.json").eos == eos


def test_the_vocabulary_holds_every_token_and_what_the_model_has(folder: Path):
    tokenizer = folder / "tokenizer"
    assert load_tokenizer(tokenizer).vocab_size == VOCAB_SIZE
    for config, size in (
        ({"vocab_size": 300}, 300),
        ({"vocab_size": 9}, 259),
        ({"text_config": {"vocab_size": 400}}, 400),
    ):
        (tokenizer / "config.json").write_text(json.dumps(config))
        assert load_tokenizer(tokenizer).vocab_size == size
    words = {"type": "WordLevel", "vocab": {"?": 0, "a": 1000}, "unk_token": "?"}
    (folder / "gap.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
    gap = load_tokenizer(folder / "gap.json", no_eos=True)
    assert gap.encode(Document("a", "")).tokens.tolist() == [1000]
    assert gap.vocab_size == 1001


def test_the_description_says_what_was_made_and_nothing_of_the_machine(folder: Path):
    source = write_jsonl(folder / "a.jsonl", TEXTS)
    report = folder / "report.json"
    assert run(folder, source, "--json", report) == 0
    text = (folder / "out.json").read_text()
    found = json.loads(text)
    num_tokens = sum(map(len, expected(TEXTS)))
    assert (found["documents"], found["tokens"], found["vocab_size"]) == (4, num_tokens, VOCAB_SIZE)
    assert found["eos"] == {"token": "</s>", "id": EOS, "origin": "tokenizer_config.json"}
    assert found["inputs"] == [{"name": "a.jsonl", "bytes": source.stat().st_size}]
    content = (folder / "tokenizer" / "tokenizer.json").read_bytes()
    assert found["tokenizer"] == {"name": "tokenizer", "sha256": hashlib.sha256(content).hexdigest()}
    assert str(folder) not in text
    shown = json.loads(report.read_text())
    assert found.items() <= shown.items()
    assert shown["seconds"] > 0


@pytest.mark.parametrize("name", ["out", "it's {a} $x=1, é", ".-x", "a\\b\\'c'd\\"])
def test_the_printed_command_is_accepted_and_reads_the_result(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    source = write_jsonl(folder / "a.jsonl", ["x" * 999] * 50)
    # The last of two options counts.
    assert run(folder, source, "--output", folder / name) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words[:3] == ["torchrun", "--nproc_per_node=2", "train_fsdp2_ep.py"]
    launch = LaunchEnvironment(world_size=2, local_world_size=2, launched=True)
    config = load_valid_config(parse_command_line(words[3:]), launch)
    cut = Cut(
        **{key: getattr(config.data, key) for key in CUT_KEYS}, heldout_fraction=0.1, vocab_size=config.model.vocab_size
    )
    data = open_data(config.data.path, cut)
    assert data.alphabet_size == VOCAB_SIZE
    assert data.train.materialise(0).tokens.tolist() == tokens_of("x") * 256


def test_the_documented_command_runs_as_a_file(folder: Path):
    source = write_jsonl(folder / "a.jsonl", TEXTS)
    command = [sys.executable, "tools/prepare_text.py", "--tokenizer", folder / "tokenizer", "--output", folder / "out"]
    done = subprocess.run([*command, source], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "out.bin, .idx, .json: 4 documents," in done.stdout


def test_bytes_read_end_at_the_size_of_all_files(folder: Path):
    files = find_inputs([write_jsonl(folder / "a.jsonl", ["x" * 1000] * 2000), write_jsonl(folder / "b.jsonl", TEXTS)])
    reader = Reader(files, "text", lines=False)
    seen = [document.bytes_read for document in reader]
    assert seen == sorted(seen)
    assert 0 < seen[1000] < files[0].num_bytes
    assert seen[-1] == reader.num_bytes == sum(file.num_bytes for file in files)
    tokenizer = load_tokenizer(folder / "tokenizer")
    *_, last = pipeline.encode_in_order(Reader(files[1:], "text", lines=False), tokenizer, 1)
    assert (len(last.documents), last.bytes_read) == (len(TEXTS), files[1].num_bytes)


def test_progress_says_bytes_documents_speed_and_time_left_every_ten_seconds():
    times, stream = iter([0.0, 9.0, 10.0, 11.0, 20.0]), io.StringIO()
    with TextProgress(4 * 10**9, stream, lambda: next(times)) as progress:
        for done in (0.1, 0.25, 0.3, 0.5):
            progress.update(done, round(done * 4e9), 1000, 50_000_000)
    assert stream.getvalue().splitlines() == [
        "tokenizing: 1.0 GB of 4.0 GB  1,000 documents  5,000,000 tokens/s  0:30 left",
        "tokenizing: 2.0 GB of 4.0 GB  1,000 documents  2,500,000 tokens/s  0:20 left",
    ]


def test_a_terminal_has_a_bar():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with TextProgress(1000, stream) as progress:
        progress.update(1.0, 1000, 7, 70)
    assert "7 documents" in stream.getvalue()


def test_a_disk_too_small_for_the_rest_is_refused_early(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(prepare, "_SAMPLE_BYTES", 100)
    monkeypatch.setattr(pipeline, "_BATCH_CHARACTERS", 100)
    source = write_jsonl(folder / "a.jsonl", ["x" * 99] * 2000)  # 100 tokens of 2 bytes each
    for free, limit, code in ((500_000, (), 0), (350_000, (), 2), (350_000, ("--limit", "1500"), 0)):
        monkeypatch.setattr(prepare.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        assert run(folder, source, "--overwrite", "--workers", "1", *limit) == code
    assert re.search(r"needs about 4[0-9]{2}\.. kB more", capsys.readouterr().err)
