import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_framework.checkpoint.convert import boxes
from moe_framework.checkpoint.convert.base import TensorInfo
from moe_framework.checkpoint.convert.boxes import bytes_of, parts, read_box
from moe_framework.errors import CheckpointError

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(shapes, st.integers(4, 200))
def test_parts_follow_each_other_and_are_no_larger_than_asked(shape: tuple[int, ...], limit: int):
    whole = torch.arange(max(torch.Size(shape).numel(), 1), dtype=torch.float32).reshape(shape)
    cut = [whole[region] for region in parts(TensorInfo(shape, torch.float32), limit)]
    assert torch.equal(torch.cat([part.flatten() for part in cut]), whole.flatten())
    assert all(part.is_contiguous() and part.nbytes <= limit for part in cut)


def test_an_empty_tensor_has_one_part():
    assert len(list(parts(TensorInfo((0, 3), torch.float32)))) == 1


@settings(max_examples=200, deadline=None)
@given(st.data(), shapes, st.sampled_from([0, 40, 2**20]))
def test_a_box_of_a_file_is_that_of_the_tensor(tmp_path_factory, data: st.DataObject, shape: tuple[int, ...], gap: int):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).reshape(shape)
    path = tmp_path_factory.mktemp("box") / "file"
    path.write_bytes(b"header" + bytes(bytes_of(whole)))
    region = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        region.append(slice(start, data.draw(st.integers(start + 1, size))))
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "_GAP_BYTES", gap)
        box = read_box(descriptor, path, 6, TensorInfo(shape, torch.int16), tuple(region))
    os.close(descriptor)
    assert torch.equal(box, whole[tuple(region)])
    assert box.is_contiguous()


def test_columns_are_read_in_few_large_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = torch.arange(4096 * 1024, dtype=torch.int16).reshape(4096, 1024)
    path = tmp_path / "file"
    path.write_bytes(bytes_of(whole))
    calls, read = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: calls.append(args) or read(*args))
    with path.open("rb") as stream:
        box = read_box(stream.fileno(), path, 0, TensorInfo((4096, 1024), torch.int16), (slice(0, 4096), slice(8, 64)))
    assert torch.equal(box, whole[:, 8:64])
    assert len(calls) <= 16
    assert max(len(view) for _, (view,), _ in calls) <= 2**20


def test_a_file_that_ends_early_is_named(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.raises(CheckpointError, match=r"file: ends at byte 10, .* truncated"):
        read_box(descriptor, path, 4, TensorInfo((4,), torch.int16), None)
    os.close(descriptor)
