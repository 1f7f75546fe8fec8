"""Writes Megatron-Core's token files for tests, byte by byte as its format says."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float32": 7, "uint16": 8}


def write_token_files(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16") -> list[int]:
    """Write `PREFIX.bin` and `PREFIX.idx`.

    Args:
        prefix: Of both.
        documents: Each a list of sequences of tokens.
        dtype: Of the tokens.

    Returns:
        All tokens.
    """
    sequences = [sequence for document in documents for sequence in document]
    tokens = [token for sequence in sequences for token in sequence]
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    first = np.cumsum([0, *(len(document) for document in documents)])
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, CODES[dtype], len(sequences), len(first))
    index = header + lengths.tobytes() + starts.astype("<i8").tobytes() + first.astype("<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(np.array(tokens, dtype=dtype).tobytes())
    return tokens
