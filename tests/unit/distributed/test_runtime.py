import pytest
import torch
import torch.distributed as dist

from moe_framework.distributed.runtime import LaunchEnvironment, launch_environment, resolve_device, start
from moe_framework.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def num_gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return request.param


def test_plain_python_is_one_rank():
    assert launch_environment({"PATH": "/bin"}) == LaunchEnvironment(0, 0, 1, 1, launched=False)


def test_torchruns_variables_are_read():
    assert launch_environment(TORCHRUN) == LaunchEnvironment(5, 1, 8, 4, launched=True)


@pytest.mark.parametrize("missing", [name for name in TORCHRUN if name not in ("RANK", "WORLD_SIZE")])
def test_a_missing_variable_is_named(missing: str):
    with pytest.raises(ConfigError, match=f"{missing} not set"):
        launch_environment({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize("lonely", ["RANK", "WORLD_SIZE"])
def test_half_a_launch_is_refused(lonely: str):
    with pytest.raises(ConfigError, match=r"LOCAL_RANK.*not set"):
        launch_environment({lonely: "0"})


def test_a_rank_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match=r"integers.*'first'"):
        launch_environment(TORCHRUN | {"RANK": "first"})


@pytest.mark.parametrize(
    ("num_gpus", "device", "local_rank", "expected"),
    [
        (0, "auto", 0, "cpu"),
        (0, "cpu", 3, "cpu"),
        (2, "cpu", 0, "cpu"),
        (2, "auto", 1, "cuda:1"),
        (2, "cuda", 0, "cuda:0"),
    ],
    indirect=["num_gpus"],
)
def test_device_is_the_gpu_of_the_local_rank_where_there_is_one(
    num_gpus: int, device: str, local_rank: int, expected: str
):
    assert resolve_device(device, local_rank) == torch.device(expected)


@pytest.mark.parametrize(
    ("num_gpus", "device", "local_rank"), [(0, "cuda", 0), (2, "cuda", 2), (2, "auto", 2)], indirect=["num_gpus"]
)
def test_a_rank_without_its_gpu_is_refused(num_gpus: int, device: str, local_rank: int):
    with pytest.raises(ConfigError, match=rf"device={device}.*{num_gpus}"):
        resolve_device(device, local_rank)


def test_one_process_starts_without_a_launcher_and_leaves_nothing():
    with start(LaunchEnvironment(), "cpu") as runtime:
        assert runtime.is_main
        assert runtime.device == torch.device("cpu")
        assert dist.get_world_size() == dist.get_world_size(runtime.checkpoint_group) == 1
    assert not dist.is_initialized()


def test_an_error_inside_ends_the_process_group_too():
    with pytest.raises(RuntimeError, match="inside"), start(LaunchEnvironment(), "cpu"):
        raise RuntimeError("inside")
    assert not dist.is_initialized()
