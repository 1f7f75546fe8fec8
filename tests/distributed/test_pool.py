"""The pool that every multi-process test relies on, tested itself."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from moe_framework.errors import ConfigError
from tests.helpers.pool import RankPool, RanksFailedError


def sum_of_ranks(offset: int, *, scale: int) -> tuple[int, torch.Tensor]:
    value = torch.tensor([scale * (dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), value


def torchrun_variables() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))


def restarted_through_torchruns_variables() -> float:
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def fail_on(rank: int, text: str) -> None:
    if dist.get_rank() == rank:
        raise ConfigError(text)


def fail_on_zero_while_others_wait() -> None:
    if dist.get_rank() == 0:
        raise ConfigError("only here")
    dist.barrier()


def hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_traces() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(99)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")


def traces() -> tuple:
    state = torch.get_default_dtype(), str(torch.get_default_device()), torch.are_deterministic_algorithms_enabled()
    return *state, torch.rand(1).item(), "LEFT_BEHIND" in os.environ, os.getcwd()


def mesh_is_current(num_earlier_groups: int) -> bool:
    """Whether DTensor returns this job's mesh, whose groups are numbered by those created before it."""
    for _ in range(num_earlier_groups):
        dist.new_group([0])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    doubled = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]) * 2
    assert isinstance(doubled, DTensor)
    return doubled.device_mesh is mesh and doubled.full_tensor().sum().item() == 24


def test_every_rank_runs_the_function_and_results_come_in_rank_order(ranks: RankPool):
    assert ranks.run(sum_of_ranks, 3, 1, scale=2) == [(rank, torch.tensor([12])) for rank in range(3)]


def test_processes_are_reused(ranks: RankPool):
    ranks.run(sum_of_ranks, 2, 0, scale=1)
    before = ranks.pids
    ranks.run(sum_of_ranks, 1, 0, scale=1)
    ranks.run(sum_of_ranks, 2, 0, scale=1)
    assert ranks.pids == before


def test_ranks_see_the_variables_that_torchrun_sets(ranks: RankPool):
    assert ranks.run(torchrun_variables, 2) == [("0", "0", "2", "2"), ("1", "1", "2", "2")]


def test_a_job_can_start_its_own_process_group_as_under_torchrun(ranks: RankPool):
    assert ranks.run(restarted_through_torchruns_variables, 2) == [2.0, 2.0]


def test_an_error_fails_the_test_with_the_failing_ranks_traceback(ranks: RankPool):
    with pytest.raises(RanksFailedError, match=r"rank 1:\n(.|\n)*in fail_on\n(.|\n)*ConfigError: bad value") as caught:
        ranks.run(fail_on, 2, 1, "bad value")
    assert "rank 0" not in str(caught.value)


def test_an_expected_error_is_returned_per_rank_and_the_pool_goes_on(ranks: RankPool):
    before = ranks.pids
    assert ranks.run_expecting_error(fail_on, 2, 1, "bad value") == [None, ("ConfigError", "bad value")]
    assert ranks.run(sum_of_ranks, 2, 0, scale=1)[0][1] == 1
    assert set(before) <= set(ranks.pids)


def test_a_rank_left_waiting_by_anothers_error_counts_as_hung(ranks: RankPool):
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"only here(.|\n)*rank 1: no answer(.|\n)*fail_on_zero_while"):
        ranks.run_expecting_error(fail_on_zero_while_others_wait, 2)
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_a_hang_ends_at_the_timeout_with_the_stacks_and_the_pool_restarts(ranks: RankPool):
    ranks.run(sum_of_ranks, 2, 0, scale=1)
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"rank 1: no answer(.|\n)*in hang_on_one"):
        ranks.run(hang_on_one, 2, timeout_s=5)
    assert 5 <= time.monotonic() - started < 20
    assert ranks.run(sum_of_ranks, 2, 0, scale=1)[0][1] == 1


def test_a_killed_rank_is_noticed_at_once_and_the_pool_restarts(ranks: RankPool):
    ranks.run(sum_of_ranks, 2, 0, scale=1)
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1: died with exit code -9"):
        ranks.run(die_on_one, 2)
    assert time.monotonic() - started < 10
    assert ranks.run(sum_of_ranks, 2, 0, scale=1)[0][1] == 1


def test_a_job_starts_from_a_clean_process(ranks: RankPool):
    before = ranks.run(traces, 1)
    ranks.run(leave_traces, 1)
    assert ranks.run(traces, 1) == before


def test_dtensor_does_not_return_an_earlier_jobs_mesh(ranks: RankPool):
    assert ranks.run(mesh_is_current, 2, 0) == [True, True]
    assert ranks.run(mesh_is_current, 2, 3) == [True, True]


def test_closing_leaves_no_process():
    pool = RankPool()
    pool.run(torchrun_variables, 1)
    (pid,) = pool.pids
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_more_ranks_than_the_pool_has_are_refused(ranks: RankPool):
    with pytest.raises(ValueError, match="world_size=9"):
        ranks.run(torchrun_variables, 9)
