"""Starting the ranks of a comparison as processes of this machine, without a launcher."""

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

# Imported before any process group exists: its default arguments keep the group of that moment for good, and torch
# imports it late, such as for a dispatch mode. The threads of a kept group can abort the interpreter's end (2.11).
import torch.distributed.nn.functional
from torch.multiprocessing.spawn import spawn

from moe_framework.distributed.runtime import launch_environment, resolve_device, start

TIMEOUT = timedelta(minutes=5)
RESULT_FILE = "result.pickle"


def run_on_ranks(function: Callable[..., Any], num_ranks: int, device_type: str, *arguments: Any) -> Any:
    """Call a function in new processes that form a process group: gloo on CPU, NCCL on CUDA, a GPU each.

    Args:
        function: At the top level of its module; called with (group, device, *arguments) on every rank.
        num_ranks: Ranks; on CUDA at most the GPUs of this machine.
        device_type: `cpu` or `cuda`.
        arguments: Must be picklable.

    Returns:
        What rank 0 returned.

    Raises:
        ProcessRaisedException: A rank raised; the text has its traceback. The other ranks are ended.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        spawn(_rank_main, (num_ranks, device_type, folder, function, arguments), nprocs=num_ranks)
        # Written by our own rank 0 into a folder that only this user can write.
        return pickle.loads((Path(folder) / RESULT_FILE).read_bytes())


class Launched(NamedTuple):
    """What a function returned on this rank of a launcher's."""

    rank: int
    result: Any


def run_under_launcher(function: Callable[..., Any], device: str, *arguments: Any) -> Launched | None:
    """Call a function on the ranks that torchrun has started, this process being one of them.

    Args:
        function: Called with (group, device, *arguments).
        device: `auto`, `cpu` or `cuda`.
        arguments: The same on every rank.

    Returns:
        This rank and its result, or None if no launcher has started this process.

    Raises:
        ConfigError: The launcher's variables are incomplete, or there are too few GPUs.

    Collective: the world; every rank must call.
    """
    launch = launch_environment()
    if not launch.launched:
        return None
    with start(launch, device, timeout_s=TIMEOUT.total_seconds()) as runtime:
        group = dist.group.WORLD
        assert group is not None
        return Launched(launch.rank, function(group, runtime.device, *arguments))


class Measurement(Protocol):
    """What a command line says of the ranks to measure on."""

    @property
    def device(self) -> str:
        """`auto`, `cpu` or `cuda`."""
        ...

    @property
    def num_ranks(self) -> int:
        """Ranks to start where no launcher has."""
        ...


def measure_on_ranks[O: Measurement, R](
    function: Callable[[dist.ProcessGroup, torch.device, O], R], options: O
) -> R | None:
    """Call a measurement on the ranks of a launcher, or on new ones where none has started this process.

    Args:
        function: At the top level of its module; called with (group, device, options) on every rank.
        options: Picklable.

    Returns:
        What rank 0 returned; None on the other ranks of a launcher.

    Raises:
        ConfigError: The launcher's variables are incomplete, or there are too few GPUs.
        ProcessRaisedException: A rank raised; the text has its traceback.
    """
    launched = run_under_launcher(function, options.device, options)
    if launched is not None:
        return launched.result if launched.rank == 0 else None
    device = resolve_device(options.device, 0, options.num_ranks)
    return run_on_ranks(function, options.num_ranks, device.type, options)


def _rank_main(
    rank: int, num_ranks: int, device_type: str, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    # One thread per rank: the ranks share this machine's cores.
    torch.set_num_threads(1)
    on_cuda = device_type == "cuda"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=TIMEOUT,
        device_id=device if on_cuda else None,
    )
    group = dist.group.WORLD
    assert group is not None
    result = function(group, device, *arguments)
    if rank == 0:
        (Path(folder) / RESULT_FILE).write_bytes(pickle.dumps(result))
    # Without it a rank may tear its connections down while another is still in a collective (torch 2.11).
    dist.barrier()
    # Not after an error: connections that close early make other ranks fail, whose errors would hide the first.
    dist.destroy_process_group()
