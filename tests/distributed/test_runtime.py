import torch
import torch.distributed as dist

from moe_framework.distributed.runtime import launch_environment, start
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
