import os
import socket

import torch
import torch.distributed as dist

from moe_framework.distributed.mesh import build_mesh
from moe_framework.distributed.runtime import LaunchEnvironment, launch_environment, set_timeouts, start
from tests.helpers.pool import RankPool


def restart() -> tuple[int, bool, float, float]:
    """Leave the pool's process group and start one as an entry point would under torchrun."""
    dist.barrier()
    dist.destroy_process_group()
    with start(launch_environment(), "auto") as runtime:
        value, checkpoint_value = torch.ones(1), torch.full((1,), 2.0)
        dist.all_reduce(value)
        dist.all_reduce(checkpoint_value, group=runtime.checkpoint_group)
        result = runtime.launch.rank, runtime.is_main, value.item(), checkpoint_value.item()
    assert not dist.is_initialized()
    return result


def test_ranks_start_from_torchruns_variables(ranks: RankPool):
    assert ranks.run(restart, 2) == [(0, True, 2.0, 4.0), (1, False, 2.0, 4.0)]


def meet(port: int) -> tuple[float, str]:
    """Leave the pool's process group and start one as a task of `srun` does, without torchrun's variables."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    place = LaunchEnvironment(rank, rank, world_size, world_size, launched=True, init_method=f"tcp://127.0.0.1:{port}")
    try:
        with start(place, "cpu"):
            value = torch.ones(1)
            dist.all_reduce(value)
        return value.item(), os.environ["TORCH_FR_BUFFER_SIZE"]
    finally:
        os.environ |= kept


def test_ranks_start_without_torchruns_variables_and_record_their_collectives(ranks: RankPool):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    assert ranks.run(meet, 2, port) == [(2.0, "2000"), (2.0, "2000")]


def timeouts_of_a_mesh(seconds: float) -> list[float]:
    """The timeouts of the groups of a mesh, and of the world, in seconds."""
    mesh = build_mesh("cpu", dp=2, ep=2, tp=1)
    set_timeouts(seconds)
    groups = [
        mesh.root["dp_shard"].get_group(),
        mesh.root["ep"].get_group(),
        dist.distributed_c10d._get_default_group(),
    ]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_a_meshs_groups_wait_as_long_as_the_world(ranks: RankPool):
    assert ranks.run(timeouts_of_a_mesh, 4, 77.0) == [[77.0, 77.0, 77.0]] * 4
