"""The process behind one rank of the test pool: it waits for jobs, runs them, and cleans up after each.

No module-level import of torch: the environment must be set before torch is imported.
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

SEED = 1234


@dataclass(frozen=True)
class Job:
    """One function call on one rank.

    Attributes:
        target: The function, as `module:qualname`.
        arguments: Pickled (args, kwargs).
        rank: Rank of this process in the job's process group.
        world_size: Ranks of the job.
        init_method: `file://` address of a file that no other job uses.
        master_port: A free TCP port, for code that reads torchrun's variables.
        timeout_s: Seconds after which a collective raises.
        import_paths: Folders that the test process imports from.
    """

    target: str
    arguments: bytes
    rank: int
    world_size: int
    init_method: str
    master_port: int
    timeout_s: float
    import_paths: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What a rank sends back: a pickled result, or the description of an error."""

    result: bytes | None = None
    error_type: str = ""
    message: str = ""
    trace: str = ""

    @property
    def failed(self) -> bool:
        """Whether the function raised."""
        return self.result is None


def serve(connection: Connection, stack_path: str) -> None:
    """Run jobs until the connection closes.

    Args:
        connection: Gets True once torch is imported. Then, for each `Job`, an `Outcome` is sent, the order to
            tear down is received (a bool: whether every rank succeeded), and True is sent when that is done.
        stack_path: File that receives this process's stacks on SIGUSR2.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process decides what Ctrl-C means
    os.environ["OMP_NUM_THREADS"] = "1"
    # Decided when torch first communicates, and so for all jobs: the hang reports of some show what was recorded.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with open(stack_path, "w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        import torch

        torch.set_num_threads(1)
        connection.send(True)  # started: from here on a job's time counts
        while True:
            try:
                job = connection.recv()
            except EOFError:
                return
            with _process_state_restored(job):
                connection.send(_run(job))
                _tear_down(everyone_succeeded=connection.recv())
            connection.send(True)


def _exit_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    # A rank that hangs in a collective never reads its connection's end.
    os._exit(1)


@contextlib.contextmanager
def _process_state_restored(job: Job) -> Iterator[None]:
    environment, folder, paths = dict(os.environ), os.getcwd(), list(sys.path)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.master_port),
    )
    sys.path[:] = [*job.import_paths, *(path for path in paths if path not in job.import_paths)]
    _reset_torch()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:] = paths


def _reset_torch() -> None:
    import numpy as np
    import torch

    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    _forget_meshes()
    gc.collect()


def _forget_meshes() -> None:
    """Clear DTensor's caches, which return meshes of earlier jobs: equal ones, whose groups are destroyed."""
    import torch

    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()  # pyright: ignore[reportAttributeAccessIssue]
    clear_redistribute_planner_cache()


def _run(job: Job) -> Outcome:
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            init_method=job.init_method,
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout_s),
        )
        args, kwargs = pickle.loads(job.arguments)
        # Not through Connection.send: torch would pass tensors as shared memory, which dies with this process.
        return Outcome(result=pickle.dumps(_resolve(job.target)(*args, **kwargs)))
    except BaseException as error:  # SystemExit and DCP's CheckpointException are outcomes too
        return Outcome(
            error_type=type(error).__name__, message=str(error), trace="".join(traceback.format_exception(error))
        )


def _resolve(target: str) -> Any:
    module_name, qualname = target.split(":")
    found: Any = importlib.import_module(module_name)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _tear_down(*, everyone_succeeded: bool) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if everyone_succeeded:
        dist.barrier()  # gloo aborts ranks whose peers leave while a collective is finishing
    dist.destroy_process_group()
