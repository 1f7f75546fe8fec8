"""A stored tensor is read in place, byte for byte as torch.load would, and a crafted one runs nothing."""

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_framework.checkpoint.convert.base import TensorInfo
from moe_framework.checkpoint.convert.dcp_item import locate_item, read_item
from moe_framework.errors import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def stored(path: Path, value: Any, *, before: bytes = b"some bytes") -> tuple[int, int]:
    """Save a value at an offset of a file, with more after it; return offset and length."""
    stream = io.BytesIO()
    torch.save(value, stream)
    path.write_bytes(before + stream.getvalue() + b"more")
    return len(before), len(stream.getvalue())


def read(path: Path, place: tuple[int, int], expected: Tensor | None = None, region: Any = None) -> Tensor:
    """Read what is stored; `expected` is a tensor of the announced shape and dtype."""
    expected = torch.zeros(3, 4) if expected is None else expected
    descriptor = os.open(path, os.O_RDONLY)
    try:
        item = locate_item(descriptor, f"{path}: 'w'", *place, TensorInfo(tuple(expected.shape), expected.dtype))
        return read_item(descriptor, path, item, region)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
def test_the_values_are_those_that_were_saved(tmp_path: Path, dtype: torch.dtype):
    value = (torch.randn(5, 7) * 3).to(dtype)
    place = stored(tmp_path / "x", value)
    found = read(tmp_path / "x", place, value)
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 1, 3)])
def test_any_shape_is_read(tmp_path: Path, shape: tuple[int, ...]):
    value = torch.randn(shape)
    assert torch.equal(read(tmp_path / "x", stored(tmp_path / "x", value), value), value)


def test_a_box_and_a_view_into_a_larger_storage_are_read(tmp_path: Path):
    value = torch.randn(10, 6)[2:8]
    place = stored(tmp_path / "x", value)
    assert torch.equal(read(tmp_path / "x", place, value, (slice(1, 4), slice(2, 5))), value[1:4, 2:5])


@pytest.mark.parametrize("other", [torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.float64)])
def test_a_tensor_other_than_the_announced_is_refused_by_name(tmp_path: Path, other: Tensor):
    with pytest.raises(CheckpointError, match=r"x: 'w' is \[3, 4\] torch.float32 in the file, .* in .metadata"):
        read(tmp_path / "x", stored(tmp_path / "x", torch.randn(3, 4)), other)


def test_a_chunk_that_does_not_lie_row_major_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="do not lie row-major"):
        read(tmp_path / "x", stored(tmp_path / "x", torch.randn(3, 4).T))


class Crafted:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("where", ["instead", "inside"])
def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, where: str):
    crafted = Crafted(tmp_path / "ran")
    value = crafted if where == "instead" else [torch.randn(3), crafted]
    with pytest.raises(CheckpointError, match=r"x: 'w' is refused: it wants __builtin__\.getattr.*Nothing was run"):
        read(tmp_path / "x", stored(tmp_path / "x", value))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", [[torch.randn(3)], {"a": 1}, 3, torch.nn.Parameter(torch.randn(3))])
def test_what_is_no_plain_tensor_is_refused(tmp_path: Path, value: Any):
    with pytest.raises(CheckpointError, match="refused"):
        read(tmp_path / "x", stored(tmp_path / "x", value))


def rewritten(path: Path, place: tuple[int, int], **changes: bytes) -> tuple[int, int]:
    """Replace members of the archive."""
    offset, length = place
    old = zipfile.ZipFile(io.BytesIO(path.read_bytes()[offset : offset + length]))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, changes.get(name.split("/", 1)[1].replace("/", "_").replace(".", "_"), old.read(name)))
    path.write_bytes(stream.getvalue())
    return 0, len(stream.getvalue())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_0": bytes(8)}, "its storage is smaller than the tensor"),
        ({"byteorder": b"big"}, "not little-endian"),
        ({"data_pkl": b"\x80\x02}."}, "it is not a plain tensor"),
        ({"data_pkl": b"\x80"}, "refused"),
        ({"data_pkl": pickle.dumps(3, 0) + bytes(2**20)}, "one small pickle"),
    ],
)
def test_an_archive_that_lies_is_refused(tmp_path: Path, changes: dict[str, bytes], message: str):
    place = rewritten(tmp_path / "x", stored(tmp_path / "x", torch.randn(3, 4)), **changes)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "x", place)


def test_an_archive_that_is_cut_off_is_refused(tmp_path: Path):
    offset, length = stored(tmp_path / "x", torch.randn(3, 4))
    with pytest.raises(CheckpointError, match="refused"):
        read(tmp_path / "x", (offset, length - 30))


def test_a_compressed_archive_is_refused(tmp_path: Path):
    offset, length = stored(tmp_path / "x", torch.randn(3, 4))
    old = zipfile.ZipFile(io.BytesIO((tmp_path / "x").read_bytes()[offset : offset + length]))
    with zipfile.ZipFile(tmp_path / "y", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        read(tmp_path / "y", (0, (tmp_path / "y").stat().st_size))
