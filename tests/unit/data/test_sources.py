"""What data.path may name, and what is said when it cannot be used."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_framework.data.blend import BlendedRows
from moe_framework.data.packing import Rows
from moe_framework.data.sources import Cut, Data, files_of, open_data, parse_weights
from moe_framework.data.token_rows import TokenRows
from moe_framework.errors import ConfigError, DataError
from tests.helpers.token_files import write_token_files


def write_fasta(folder: Path, text: str, name: str = "x.fa") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def write_tokens(folder: Path, name: str, tokens: range) -> str:
    write_token_files(folder / name, [[list(tokens)]])
    return str(folder / name)


def opened(path: str, **changes: Any) -> Data:
    return open_data(path, Cut(**({"seq_length": 8, "heldout_fraction": 0.25} | changes)))


def test_fasta_is_split_once_and_its_heldout_rows_never_overlap(tmp_path: Path):
    data = opened(write_fasta(tmp_path, ">a\n" + "ACGT" * 50 + "\n"), stride=4)
    train, heldout = data.train, data.heldout
    assert isinstance(train, Rows)
    assert isinstance(heldout, Rows)
    assert data.sequences is not None
    assert data.sequences.num_bases == 200
    assert data.fingerprint == data.sequences.fingerprint
    assert data.alphabet_size == 4
    assert train.window_stop.max() == 151
    assert heldout.window_start.min() == 151
    assert (np.diff(train.window_start) == 4).all()
    assert (np.diff(heldout.window_start) == 8).all()


@pytest.mark.parametrize(
    ("text", "fraction", "part"),
    [
        (">a\nACGTACGT\n", 0.0, "held-out"),
        (">a\nACGTACGT\n", 1.0, "training"),
        (">a\nACGTACGTAC\n", 0.1, "held-out"),
        (">a\nACGTACGT\n>b\nNNNNNNNN\n", 0.5, "held-out"),
        (">a\nNNNNNNNN\n>b\nACGTACGT\n", 0.5, "training"),
    ],
)
def test_part_without_anything_to_predict_names_the_keys(tmp_path: Path, text: str, fraction: float, part: str):
    expected = rf"data.heldout_fraction={fraction}: the {part} part .*data.seq_length=8.*data.heldout_fraction"
    with pytest.raises(DataError, match=expected):
        opened(write_fasta(tmp_path, text), heldout_fraction=fraction)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_token_files_are_opened_by_prefix_or_by_either_file(tmp_path: Path, suffix: str):
    data = opened(write_tokens(tmp_path, "text", range(40)) + suffix, heldout_fraction=0.5, vocab_size=64)
    assert isinstance(data.train, TokenRows)
    assert isinstance(data.heldout, TokenRows)
    assert data.train.materialise(0).tokens.tolist() == list(range(8))
    assert data.heldout.materialise(0).tokens.tolist() == list(range(20, 28))
    assert data.sequences is None
    assert data.alphabet_size == 64


@pytest.mark.parametrize(
    ("tokens", "fraction", "part", "verb"), [(40, 0.01, "held-out", "Raise"), (40, 0.99, "training", "Lower")]
)
def test_token_files_too_short_for_a_row_name_the_keys(
    tmp_path: Path, tokens: int, fraction: float, part: str, verb: str
):
    path = write_tokens(tmp_path, "text", range(tokens))
    with pytest.raises(DataError, match=rf"fraction={fraction}: the {part} part .* of 40 tokens, .*{verb} data\.held"):
        opened(path, heldout_fraction=fraction)


@pytest.mark.parametrize(("key", "value", "none"), [("stride", 2, 0), ("reverse_complement", True, False)])
def test_keys_of_fasta_are_refused_for_token_files(tmp_path: Path, key: str, value: Any, none: Any):
    with pytest.raises(
        ConfigError, match=rf"data\.{key}={value} needs FASTA, and data\.path=.* Set data\.{key}={none}\."
    ):
        opened(write_tokens(tmp_path, "text", range(40)), **{key: value})


def test_a_stream_is_refused_for_fasta(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data\.separate_documents=false needs token files"):
        opened(write_fasta(tmp_path, ">a\n" + "ACGT" * 50 + "\n"), separate_documents=False)


def test_weights_and_paths_are_a_blend(tmp_path: Path):
    a, b = write_tokens(tmp_path, "a", range(100)), write_tokens(tmp_path, "b", range(100, 200))
    data = opened(f"3 {a} 1 {b}.idx", heldout_fraction=0.5, vocab_size=200)
    assert isinstance(data.train, BlendedRows)
    assert data.train.counts == (750_000, 250_000)
    assert [part.path for part in data.train.parts] == [a, b]
    assert len(data.heldout) == 12
    firsts = {int(data.train.materialise(int(row)).tokens[0]) for row in data.train.order(np.arange(100), 0)}
    assert firsts == {0, 8, 16, 24, 32, 40, 100, 108, 116, 124, 132, 140}


def test_fingerprints_of_blends_differ_with_parts_and_weights(tmp_path: Path):
    a, b = write_tokens(tmp_path, "a", range(100)), write_tokens(tmp_path, "b", range(100, 200))
    paths = (f"3 {a} 1 {b}", f"1 {a} 3 {b}", f"3 {b} 1 {a}", f"3 {a} 1 {a}")
    assert len({opened(path, heldout_fraction=0.5).fingerprint for path in paths}) == len(paths)
    assert (
        opened(f"6 {a} 2 {b}", heldout_fraction=0.5).fingerprint == opened(paths[0], heldout_fraction=0.5).fingerprint
    )


def test_several_genomes_are_a_blend_of_nucleotides(tmp_path: Path):
    a = write_fasta(tmp_path, ">a\n" + "ACGT" * 50 + "\n", "a.fa")
    b = write_fasta(tmp_path, ">a\n" + "GGCC" * 50 + "\n", "b.fa")
    data = opened(f"1 {a} 1 {b}", reverse_complement=True)
    assert data.sequences is None
    assert data.alphabet_size == 4
    assert len(data.train) == 2 * len(opened(a).train)


def test_fasta_and_token_files_are_not_mixed(tmp_path: Path):
    a, b = write_tokens(tmp_path, "a", range(100)), write_fasta(tmp_path, ">a\n" + "ACGT" * 50 + "\n")
    with pytest.raises(ConfigError, match="mixes FASTA and token files"):
        opened(f"1 {a} 1 {b}", vocab_size=200)


@pytest.mark.parametrize(
    "path", ["0.5 /a 0.5", "0.5 /a x /b", "0 /a 1 /b", "-1 /a 1 /b", "inf /a 1 /b", "nan /a 1 /b", "0.5 /my data 1 /b"]
)
def test_what_is_no_list_of_pairs_is_refused_with_an_example(path: str):
    with pytest.raises(ConfigError, match=r"'weight path weight path …' with positive weights"):
        parse_weights(path)


@pytest.mark.parametrize("path", [None, "/data/a", "/my data/x.fa", "x"])
def test_one_path_is_no_blend(path: str | None):
    assert parse_weights(path) is None


def test_a_weight_too_small_for_a_block_is_refused(tmp_path: Path):
    a, b = write_tokens(tmp_path, "a", range(100)), write_tokens(tmp_path, "b", range(100, 200))
    with pytest.raises(ConfigError, match=rf"{b} has less than about 1/1000000 of the weights"):
        opened(f"1 {a} 1e-7 {b}")


def test_an_error_of_a_part_names_its_path(tmp_path: Path):
    a = write_tokens(tmp_path, "a", range(100))
    with pytest.raises(DataError, match=r"data\.path=.*/missing\.fa: no such file"):
        opened(f"1 {a} 1 {tmp_path}/missing.fa", vocab_size=200)


def test_the_files_that_a_path_names_are_those_that_are_opened(tmp_path: Path):
    a = write_tokens(tmp_path, "a", range(100))
    assert files_of(a) == files_of(f"{a}.idx") == [f"{a}.bin", f"{a}.idx"]
    assert files_of(f"1 {a} 2 {tmp_path}/x.fa") == [f"{a}.bin", f"{a}.idx", f"{tmp_path}/x.fa"]
    assert files_of("/no/such") == ["/no/such"]


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused_before_training(tmp_path: Path):
    path = write_tokens(tmp_path, "text", range(40))
    (tmp_path / "text.json").write_text('{"vocab_size": 50}')
    with pytest.raises(ConfigError, match=r"model\.vocab_size=49 must be at least 50, .*Set model\.vocab_size=50"):
        opened(path, vocab_size=49)
    assert len(opened(path, vocab_size=50).train) > 0


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"vocab_size": "many"}'])
def test_a_description_of_something_else_says_nothing(tmp_path: Path, content: str):
    path = write_tokens(tmp_path, "text", range(40))
    (tmp_path / "text.json").write_text(content)
    assert len(opened(path, vocab_size=40).train) > 0


def test_of_a_test_set_every_base_is_held_out_and_none_is_trained_on(tmp_path: Path):
    data = opened(write_fasta(tmp_path, ">a\nACGTACGTAC\n>b\nGGTN\n"), heldout_fraction=0.1, whole=True)
    rows = [data.heldout.materialise(row) for row in range(len(data.heldout))]
    assert sum(int((row.targets >= 0).sum()) for row in rows) == 13
    assert len(data.train) == 0


def test_of_a_test_set_every_row_of_tokens_is_held_out(tmp_path: Path):
    a, b = write_tokens(tmp_path, "a", range(41)), write_tokens(tmp_path, "b", range(20))
    data = opened(f"0.5 {a} 0.5 {b}", heldout_fraction=0.1, vocab_size=64, whole=True)
    assert [len(data.train), len(data.heldout)] == [0, 5 + 2]
    assert data.heldout.materialise(0).tokens.tolist() == list(range(8))


@pytest.mark.parametrize("kind", ["tokens", "fasta"])
def test_a_test_set_without_anything_to_predict_is_refused(tmp_path: Path, kind: str):
    path = write_tokens(tmp_path, "a", range(8)) if kind == "tokens" else write_fasta(tmp_path, ">a\nNNNN\n")
    expected = "8 tokens, too few for a row" if kind == "tokens" else "no A, C, G or T to predict"
    with pytest.raises(DataError, match=rf"data\.path=.*: the file has {expected}"):
        opened(path, whole=True)
