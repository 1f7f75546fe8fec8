from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_framework.distributed.runtime import (
    TE_FUSION_FLAG,
    LaunchEnvironment,
    launch_environment,
    request_te_fusion,
    resolve_device,
    start,
)
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


@pytest.mark.parametrize("started_by", [{}, TORCHRUN])
def test_the_file_for_the_exit_code_is_read(started_by: dict[str, str]):
    assert launch_environment(started_by).exit_file is None
    assert launch_environment(started_by | {"MOE_EXIT_FILE": ""}).exit_file is None
    assert launch_environment(started_by | {"MOE_EXIT_FILE": "/job/code"}).exit_file == Path("/job/code")


def test_restarts_are_counted_where_one_agent_has_all_ranks():
    restarted = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}
    assert launch_environment(restarted | {"GROUP_WORLD_SIZE": "1"}).num_restarts == 2
    assert launch_environment(restarted | {"GROUP_WORLD_SIZE": "2"}).num_restarts == 0
    assert launch_environment(TORCHRUN).num_restarts == 0


def test_a_request_to_stop_can_be_in_a_file():
    assert launch_environment(TORCHRUN | {"MOE_STOP_FILE": "/tmp/stop"}).stop_file == Path("/tmp/stop")
    assert launch_environment({"MOE_STOP_FILE": "/tmp/stop"}).stop_file == Path("/tmp/stop")
    assert launch_environment(TORCHRUN).stop_file is None


def test_ft_launcher_is_told_from_torchrun():
    assert not launch_environment(TORCHRUN).ft_launcher
    assert launch_environment(TORCHRUN | {"FT_RANK_MONITOR_IPC_SOCKET": "/tmp/socket"}).ft_launcher


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
        (0, "cpu", 1, "cpu"),
        (2, "cpu", 0, "cpu"),
        (2, "auto", 1, "cuda:1"),
        (2, "cuda", 0, "cuda:0"),
        (1, "auto", 0, "cpu"),
        (1, "auto", 1, "cpu"),
    ],
    indirect=["num_gpus"],
)
def test_all_of_a_hosts_ranks_get_a_gpu_or_none_does(num_gpus: int, device: str, local_rank: int, expected: str):
    assert resolve_device(device, local_rank, local_world_size=2) == torch.device(expected)


@pytest.mark.parametrize("local_rank", [0, 1])
@pytest.mark.parametrize("num_gpus", [0, 1], indirect=True)
def test_too_few_gpus_are_refused_by_every_rank_of_the_host(num_gpus: int, local_rank: int):
    with pytest.raises(ConfigError, match=rf"device=cuda: the host has {num_gpus} GPUs for 2 ranks") as refused:
        resolve_device("cuda", local_rank, local_world_size=2)
    # One of the host's ranks says it: rank 0's host may have enough.
    assert refused.value.said_elsewhere is (local_rank != 0)


def test_the_fusion_is_asked_for_before_transformer_engine_is_imported():
    environ: dict[str, str] = {}
    assert request_te_fusion(environ, te_is_imported=False) is None
    assert environ == {TE_FUSION_FLAG: "1"}
    assert request_te_fusion(environ, te_is_imported=True) is None


def test_asking_for_the_fusion_after_the_import_is_too_late_and_said():
    environ: dict[str, str] = {}
    assert "imported before" in (request_te_fusion(environ, te_is_imported=True) or "")
    assert environ == {}


@pytest.mark.parametrize("value", ["0", "", "no"])
def test_a_fusion_that_the_user_turned_off_stays_off(value: str):
    environ = {TE_FUSION_FLAG: value}
    assert f"{TE_FUSION_FLAG}={value} in the environment" in (request_te_fusion(environ, te_is_imported=False) or "")
    assert environ == {TE_FUSION_FLAG: value}


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
