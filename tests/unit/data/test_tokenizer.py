import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_framework.data.tokenizer import BOS, EOS, PAD, A, C, G, InvalidBaseError, N, NucleotideTokenizer, T

TOKENIZER = NucleotideTokenizer()


def test_every_token_has_its_published_number():
    assert (PAD, BOS, EOS, N, A, C, G, T) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert NucleotideTokenizer.vocab_size == 8


def test_bases_encode_in_either_case_and_u_reads_as_t():
    tokens = TOKENIZER.encode("ACGTUacgtu")
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == [A, C, G, T, T] * 2


def test_ambiguity_codes_and_gaps_read_as_n():
    assert set(TOKENIZER.encode("NRYSWKMBDHVXnryswkmbdhvx-.").tolist()) == {N}


@pytest.mark.parametrize("character", ["E", "L", "q", "*", " ", "1", "\x00", "é", ">"])
def test_character_that_is_no_nucleotide_code_is_refused_with_its_position(character):
    with pytest.raises(InvalidBaseError) as caught:
        TOKENIZER.encode("AC" + character + "GT")
    assert (caught.value.character, caught.value.position) == (character, 2)


def test_bytes_and_text_encode_alike():
    assert TOKENIZER.encode(b"ACNTg").tolist() == TOKENIZER.encode("ACNTg").tolist()
    with pytest.raises(InvalidBaseError):
        TOKENIZER.encode(b"AC\xff")


def test_decode_returns_the_bases_without_special_tokens():
    assert TOKENIZER.decode(np.array([BOS, A, C, N, G, T, EOS, PAD])) == "ACNGT"


@given(st.text("ACGTN"))
def test_decode_inverts_encode(sequence):
    assert TOKENIZER.decode(TOKENIZER.encode(sequence)) == sequence


@given(st.text("ACGTN"))
def test_reverse_complement_of_a_document_is_a_document_and_its_own_inverse(sequence):
    document = np.concatenate([[BOS], TOKENIZER.encode(sequence), [EOS]])
    other = TOKENIZER.complement(document[::-1])
    assert (other[0], other[-1]) == (BOS, EOS)
    assert TOKENIZER.decode(other) == sequence[::-1].translate(str.maketrans("ACGT", "TGCA"))
    assert TOKENIZER.complement(other[::-1]).tolist() == document.tolist()


def test_complement_keeps_padding():
    assert TOKENIZER.complement(np.array([PAD, N])).tolist() == [PAD, N]
