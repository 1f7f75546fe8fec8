import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_framework.checkpoint.convert.base import TensorInfo
from moe_framework.checkpoint.convert.boxes import bytes_of
from moe_framework.checkpoint.convert.safetensors_file import DTYPES, make_header, read_header
from moe_framework.errors import CheckpointError

TENSORS = {
    "b.10": torch.randn(3, 4),
    "b.9": torch.randn(5).bfloat16(),
    "a": torch.randn(2, 2).half(),
    "ü": torch.arange(3),
    "empty": torch.zeros(0, 3),
    "bits": torch.tensor([True, False, True]),
    "small": torch.arange(3, dtype=torch.int8),
    "scalar": torch.tensor(1.5, dtype=torch.float64),
    "eighth": torch.randn(4).to(torch.float8_e4m3fn),
}


def test_a_file_is_byte_for_byte_that_of_the_safetensors_package(tmp_path: Path):
    save_file = pytest.importorskip("safetensors.torch", reason="needs the hf extra").save_file
    save_file(TENSORS, tmp_path / "theirs", {"format": "pt"})
    header, places = make_header({name: TensorInfo(tuple(t.shape), t.dtype) for name, t in TENSORS.items()})
    content = bytearray(header)
    for name, place in sorted(places.items(), key=lambda item: (item[1].begin, item[1].info.num_bytes)):
        assert place.begin == len(content)
        content += bytes_of(TENSORS[name])
    assert content == (tmp_path / "theirs").read_bytes()
    assert read_header(tmp_path / "theirs") == places


def test_every_dtype_of_the_package_that_torch_has_is_known():
    types = pytest.importorskip("safetensors.torch", reason="needs the hf extra")._TYPES
    unknown = {name for name in types if name not in DTYPES}
    # What no checkpoint of a language model holds, or torch cannot slice.
    assert unknown <= {"U16", "U32", "U64", "F8_E8M0", "F4", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"}


def write(path: Path, entries: Any, data: bytes) -> Path:
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("entries", "size", "message"),
    [
        ({"a": entry(0, 8, [2])}, 7, "announces .*: truncated or damaged"),
        ({"a": entry(0, 8, [2])}, 9, "announces .*: truncated or damaged"),
        ({"a": entry(0, 8, [3])}, 8, "the size of 'a' does not fit"),
        ({"a": entry(4, 8, [1])}, 8, "gap or an overlap before 'a'"),
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12, "gap or an overlap before 'b'"),
        ({"a": entry(0, -8, [-2])}, 8, "the size of 'a' does not fit"),
        ({"a": entry(0, 8, [2], "F31")}, 8, "'a' has no known dtype"),
        ({"a": {"dtype": "F32"}}, 8, "'a' has no known dtype, shape and offsets"),
        ({"a": 3}, 8, "'a' has no known dtype, shape and offsets"),
        ([1, 2], 8, "its header is not a table"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, entries: Any, size: int, message: str):
    with pytest.raises(CheckpointError, match=message):
        read_header(write(tmp_path / "x.safetensors", entries, bytes(size)))


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 8, b"\xff" * 40, struct.pack("<Q", 90) + b"{}"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file, or truncated"):
        read_header(tmp_path / "x")


def test_a_header_that_is_not_json_is_refused(tmp_path: Path):
    (tmp_path / "x").write_bytes(struct.pack("<Q", 4) + b"{{{{")
    with pytest.raises(CheckpointError, match="its header is not JSON"):
        read_header(tmp_path / "x")


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(CheckpointError, match=r"'a' is torch\.complex64.*Give another with --dtype"):
        make_header({"a": TensorInfo((1,), torch.complex64)})
