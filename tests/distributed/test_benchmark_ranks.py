"""The benchmark's own ranks: they form a group, hand back rank 0's result, and end cleanly."""

import atexit
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException

from tools.benchmarks.ranks import run_on_ranks
from tools.benchmarks.traffic import SentBytes


def native_threads() -> list[str]:
    return [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]


def sum_and_report_threads(group: dist.ProcessGroup, device: torch.device, folder: str) -> tuple[float, int]:
    rank = group.rank()
    atexit.register(lambda: Path(folder, f"{rank}.txt").write_text("\n".join(native_threads())))
    with SentBytes(rank):
        total = torch.tensor(rank + 1.0, device=device)
    dist.all_reduce(total, group=group)
    assert any("gloo" in name for name in native_threads())
    return float(total), torch.get_num_threads()


def fail_on_rank_1(group: dist.ProcessGroup, device: torch.device) -> None:
    if group.rank() == 1:
        raise ValueError("rank 1 is broken")
    time.sleep(120)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's list of threads")
def test_ranks_return_a_result_and_keep_no_gloo_thread_to_the_end(tmp_path: Path):
    assert run_on_ranks(sum_and_report_threads, 2, "cpu", str(tmp_path)) == (3.0, 1)
    for rank in range(2):
        assert "gloo" not in (tmp_path / f"{rank}.txt").read_text()


def test_a_failing_rank_ends_the_others_and_shows_its_traceback():
    began = time.monotonic()
    with pytest.raises(ProcessRaisedException, match="rank 1 is broken"):
        run_on_ranks(fail_on_rank_1, 2, "cpu")
    assert time.monotonic() - began < 100
