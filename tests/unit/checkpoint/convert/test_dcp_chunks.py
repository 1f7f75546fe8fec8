"""Writing DCP's files from several threads."""

import threading

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from moe_framework.checkpoint.convert.base import TensorInfo
from moe_framework.checkpoint.convert.dcp_chunks import ChunkWriter
from moe_framework.checkpoint.verify import hash_file


def test_threads_write_different_tensors_at_once_each_to_its_own_file(tmp_path):
    tensors = {f"w{number}": torch.full((8, 3), float(number)) for number in range(4)}
    writer = ChunkWriter(tmp_path, {name: TensorInfo((8, 3), torch.float32) for name in tensors})
    together = threading.Barrier(len(tensors))

    def write(name: str) -> None:
        for row in range(8):
            together.wait()
            writer.write(name, (row, 0), tensors[name][row : row + 1])

    threads = [threading.Thread(target=write, args=(name,)) for name in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.finish()
    assert len(list(tmp_path.glob("__0_*.distcp"))) == len(tensors)
    read = {name: torch.empty(8, 3) for name in tensors}
    load(read, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor)


def test_file_that_is_large_enough_gets_no_more(tmp_path):
    writer = ChunkWriter(tmp_path, {"w": TensorInfo((3, 100), torch.float32)}, max_file_bytes=1)
    for row in range(3):
        writer.write("w", (row, 0), torch.ones(1, 100))
    writer.finish()
    assert len(list(tmp_path.glob("*.distcp"))) == 3


def test_dtypes_keep_their_bits(tmp_path):
    tensors = {
        str(dtype): torch.arange(24, dtype=torch.uint8).view(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64)
    }
    writer = ChunkWriter(
        tmp_path, {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    )
    for name, tensor in tensors.items():
        writer.write(name, (0,), tensor)
    writer.finish()
    read = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    load(read, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    for name, tensor in tensors.items():
        assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_sizes_and_checksums_are_those_of_the_files(tmp_path):
    writer = ChunkWriter(tmp_path, {"w": TensorInfo((3, 100), torch.float32)})
    writer.write("w", (0, 0), torch.randn(3, 100))
    writer.write_bytes(["extra"], b"abc")
    entries = writer.finish()
    assert entries.keys() == {path.name for path in tmp_path.iterdir()} == {"__0_0.distcp", ".metadata"}
    assert all(entry == hash_file(tmp_path / name) for name, entry in entries.items())


def test_a_view_is_written_without_the_rest_of_its_storage(tmp_path):
    writer = ChunkWriter(tmp_path, {"w": TensorInfo((1, 100), torch.float32)})
    writer.write("w", (0, 0), torch.randn(1000, 100)[5:6])
    assert writer.finish()["__0_0.distcp"].size < 10_000
