"""One token per nucleotide, and the complement of a strand.

Eight tokens: three special ones, N for every base that is not exactly known, and A, C, G, T.
"""

import numpy as np

PAD, BOS, EOS, N, A, C, G, T = range(8)

IGNORE_INDEX = -100
"""Target value that the loss leaves out: the default `ignore_index` of torch's cross entropy."""

_AMBIGUOUS = "NRYSWKMBDHVX-."
_INVALID = 255
_DECODE = np.frombuffer(b"   NACGT", dtype=np.uint8)
_COMPLEMENT = np.array([PAD, EOS, BOS, N, T, G, C, A], dtype=np.uint8)


class InvalidBaseError(ValueError):
    """A character that is no nucleotide code.

    Args:
        character: The offending character.
        position: Its index in the encoded string, from 0.
    """

    def __init__(self, character: str, position: int):
        self.character = character
        self.position = position
        super().__init__(f"{character!r} at base {position + 1} is no nucleotide code")


class NucleotideTokenizer:
    """Maps nucleotides to tokens and back.

    A, C, G and T (U reads as T) have tokens of their own. Every IUPAC code of an uncertain base, X and the gap
    signs `-` and `.` read as N. Lower case, which marks repeats, reads as upper case. Letters that no nucleotide
    alphabet has are refused, so that a file of proteins is not trained on as a long run of N.
    """

    vocab_size = 8

    def __init__(self):
        table = np.full(256, _INVALID, dtype=np.uint8)
        codes = {**dict.fromkeys(_AMBIGUOUS, N), "A": A, "C": C, "G": G, "T": T, "U": T}
        for letter, token in codes.items():
            table[[ord(letter), ord(letter.lower())]] = token
        self._encode = table

    def encode(self, sequence: bytes | str) -> np.ndarray:
        """Returns the tokens of a sequence, without BOS and EOS.

        Args:
            sequence: Nucleotide codes in either case.

        Returns:
            `[bases] uint8`.

        Raises:
            InvalidBaseError: A character is no nucleotide code.
        """
        raw = sequence.encode("ascii", "replace") if isinstance(sequence, str) else sequence
        tokens = self._encode[np.frombuffer(raw, dtype=np.uint8)]
        invalid = tokens == _INVALID
        if invalid.any():
            position = int(invalid.argmax())
            character = sequence[position] if isinstance(sequence, str) else chr(sequence[position])
            raise InvalidBaseError(character, position)
        return tokens

    @staticmethod
    def decode(tokens: np.ndarray) -> str:
        """Returns the bases of tokens in upper case, leaving out PAD, BOS and EOS.

        Args:
            tokens: Integers in [0, 8), any shape; read in C order.

        Raises:
            IndexError: A token is not below `vocab_size`.
        """
        tokens = np.asarray(tokens)
        return _DECODE[tokens[tokens >= N]].tobytes().decode("ascii")

    @staticmethod
    def complement(tokens: np.ndarray) -> np.ndarray:
        """Returns the token of each token's partner on the other strand, in the same order.

        BOS and EOS change places, so that a reversed and complemented document again starts with BOS and ends
        with EOS.

        Args:
            tokens: Integers in [0, 8), any shape.

        Returns:
            uint8 of the same shape.

        Raises:
            IndexError: A token is not below `vocab_size`.
        """
        return _COMPLEMENT[tokens]
