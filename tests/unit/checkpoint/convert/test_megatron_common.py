"""Reading Megatron's common state without running it."""

import io
import os
import pickle
import signal
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path, PosixPath
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_framework.checkpoint.convert.megatron_common import COMMON_KEY, common_bytes, read_common
from moe_framework.checkpoint.safe_pickle import read_metadata
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.convert.megatron_checkpoints import ARGS, save_torch_dist


class Touch:
    """Unpickling an instance creates a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def read(folder: Path) -> dict:
    return read_common(folder, read_metadata(folder, allow_bytes=True))


def test_arguments_and_iteration_are_read(tmp_path):
    save_torch_dist(tmp_path, {"w": torch.ones(1)})
    common = read(tmp_path)
    assert common["iteration"] == 7
    assert common["args"].keys() == ARGS.keys()
    assert common["args"]["rotary_base"] == 1e6


def test_values_that_are_not_plain_do_no_harm(tmp_path):
    values = {
        "path": PosixPath("/x"),
        "signal": signal.SIGTERM,
        "numbers": np.arange(3),
        "number": np.float32(1),
        "tensor": torch.ones(2),
        "layout": torch.strided,
        "nested": SimpleNamespace(a=1),
        "ordered": OrderedDict(a=1),
        "set": {1, 2},
        "bytes": b"\xff",
        "buffer": bytearray(b"ab"),
        "size": torch.Size([1]),
    }
    del values["layout"]
    save_torch_dist(tmp_path, {"w": torch.ones(1)}, {**values, "args": Namespace(**values, num_layers=3)})
    common = read(tmp_path)
    assert common["args"]["num_layers"] == 3
    assert common["ordered"] == {"a": 1}
    assert not isinstance(common["path"], Path)


@pytest.mark.parametrize("where", ["entry", "legacy"])
@pytest.mark.parametrize("inside_args", [True, False])
def test_payload_is_refused_and_does_not_run(tmp_path, where, inside_args):
    marker = tmp_path / "ran"
    payload = Touch(marker)
    common = {"args": Namespace(x=payload)} if inside_args else {"optimizer": [payload]}
    folder = save_torch_dist(tmp_path / "checkpoint", {"w": torch.ones(1)}, common if where == "entry" else {})
    if where == "legacy":
        torch.save(common, folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"refused: it wants posix\.system.*Nothing was run"):
        read(folder)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "builtins.getattr", "functools.partial", "torch.load", "os.system"])
def test_every_name_that_no_genuine_state_has_is_refused(tmp_path, name):
    module, attribute = name.rsplit(".", 1)
    program = b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b"."
    folder = save_torch_dist(tmp_path, {"w": torch.ones(1)}, {})
    with zipfile.ZipFile(folder / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", program)
    with pytest.raises(CheckpointError, match=f"it wants {module}.{attribute}"):
        read(folder)


def test_a_class_of_megatron_is_never_imported(tmp_path):
    program = b"\x80\x02]q\x00}q\x01X\x01\x00\x00\x00aq\x02cmegatron.core.enums\nModelType\nq\x03K\x01\x85Rsa."
    folder = save_torch_dist(tmp_path, {"w": torch.ones(1)}, {})
    with zipfile.ZipFile(folder / "common.pt", "w") as archive:
        archive.writestr("common/data.pkl", program)
    assert type(read(folder)["a"]).__name__ == "ModelType"


def test_legacy_file_is_read_where_there_is_one(tmp_path):
    folder = save_torch_dist(tmp_path, {"w": torch.ones(1)}, {"iteration": 1})
    torch.save({"iteration": 2, "args": Namespace(a=3)}, folder / "common.pt")
    assert read(folder) == {"iteration": 2, "args": {"a": 3}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK",
        pickle.dumps({"args": 1}),
        pytest.param(None, id="args is a number"),
    ],
)
def test_damaged_state_is_an_error(tmp_path, content):
    folder = save_torch_dist(tmp_path, {"w": torch.ones(1)}, {})
    if content is None:
        stream = io.BytesIO()
        torch.save({"args": 1}, stream)
        content = stream.getvalue()
    (folder / "common.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="common state cannot be read"):
        read(folder)


def test_checkpoint_without_common_state_has_an_empty_one(tmp_path):
    folder = save_torch_dist(tmp_path, {"w": torch.ones(1)})
    metadata = read_metadata(folder, allow_bytes=True)
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != COMMON_KEY}
    assert read_common(folder, metadata) == {}


def test_what_is_written_is_what_torch_reads_back():
    loaded = torch.load(io.BytesIO(common_bytes({"iteration": 3}, {"num_layers": 2})), weights_only=False)
    assert loaded == [{"iteration": 3, "args": Namespace(num_layers=2)}]
