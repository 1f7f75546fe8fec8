"""How this process was launched, and the start and end of its process group.

The only module that reads the environment. torch is imported inside functions, because the configuration is
validated with `launch_environment()` before torch is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from moe_framework.distributed.slurm import slurm_step
from moe_framework.errors import ConfigError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


logger = logging.getLogger(__name__)

# Read by Transformer Engine while it is imported, and off by default (2.20).
TE_FUSION_FLAG = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"

# Where rank 0 tells the launcher's script that the ranks stopped because they were told to, after saving.
EXIT_FILE = "MOE_EXIT_FILE"
STOP_FILE = "MOE_STOP_FILE"

# Set by NVRx's ft_launcher in its ranks.
FT_MONITOR_SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"

# Collectives that torch's flight recorder remembers; it reads the number when it first records one.
FLIGHT_RECORDER_SIZE = {"TORCH_FR_BUFFER_SIZE": "2000"}


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process's place among the ranks, as its launcher said.

    Attributes:
        rank: Global rank.
        local_rank: Rank on this host.
        world_size: Number of ranks.
        local_world_size: Number of ranks on this host.
        launched: True under torchrun, ft_launcher or srun; False for plain `python`, which is one rank.
        init_method: Where the ranks meet, such as `tcp://node1:10042`; None where torchrun's variables say it.
        exit_file: Where rank 0 writes the exit code of a stop on request, or None: the ranks then exit with it.
        stop_file: A file that is there if the ranks were told to stop before they could hear a signal, or None.
        num_restarts: How often the agent has restarted its ranks; 0 where several agents may have counted differently.
        ft_launcher: Whether NVRx's ft_launcher started the ranks and monitors them.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    launched: bool = False
    init_method: str | None = None
    exit_file: Path | None = None
    stop_file: Path | None = None
    num_restarts: int = 0
    ft_launcher: bool = False


@dataclass(frozen=True)
class Runtime:
    """A started process group.

    Attributes:
        launch: Where this process stands.
        device: The device of this rank.
        checkpoint_group: A gloo group over all ranks for the checkpoint store, whose background thread must not
            share a group with training.
    """

    launch: LaunchEnvironment
    device: torch.device
    checkpoint_group: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.launch.rank == 0


def launch_environment(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Read rank and world size from torchrun's variables, else from those of a Slurm job step; else, one rank.

    Args:
        environ: The variables; the process's own by default.

    Returns:
        This process's place.

    Raises:
        ConfigError: Some of torchrun's variables, or of a job step's, are missing or no integers.
    """
    environ = os.environ if environ is None else environ
    exit_file, stop_file = _path(environ, EXIT_FILE), _path(environ, STOP_FILE)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return replace(_slurm_environment(environ), exit_file=exit_file, stop_file=stop_file)
    missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise ConfigError(f"environment: {', '.join(missing)} not set although others of torchrun's are. Use torchrun.")
    try:
        rank, local_rank, world_size, local_world_size = (int(environ[name]) for name in names)
        alone = environ.get("GROUP_WORLD_SIZE") == "1"
        num_restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) if alone else 0
    except ValueError as error:
        raise ConfigError(f"environment: {', '.join(names)} must be integers ({error}). Use torchrun.") from None
    return LaunchEnvironment(
        rank,
        local_rank,
        world_size,
        local_world_size,
        launched=True,
        exit_file=exit_file,
        stop_file=stop_file,
        num_restarts=num_restarts,
        ft_launcher=bool(environ.get(FT_MONITOR_SOCKET)),
    )


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    return Path(environ[name]) if environ.get(name) else None


def _slurm_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    step = slurm_step(environ)
    if step is None:
        return LaunchEnvironment()
    # An IPv6 address is told from its port by brackets.
    host = f"[{step.master_addr}]" if ":" in step.master_addr else step.master_addr
    return LaunchEnvironment(
        step.rank,
        step.local_rank,
        step.world_size,
        step.local_world_size,
        launched=True,
        init_method=f"tcp://{host}:{step.master_port}",
    )


def request_te_fusion(
    environ: MutableMapping[str, str] | None = None, *, te_is_imported: bool | None = None
) -> str | None:
    """Ask Transformer Engine for its fused grouped MLP; to be called before its first import.

    A value that the user has set is kept.

    Args:
        environ: The variables; the process's own by default.
        te_is_imported: Whether it is too late; whether transformer_engine is loaded by default.

    Returns:
        Why Transformer Engine will not use it, or None.
    """
    environ = os.environ if environ is None else environ
    late = "transformer_engine" in sys.modules if te_is_imported is None else te_is_imported
    value = environ.get(TE_FUSION_FLAG)
    if value is None and late:
        return f"transformer_engine was imported before {TE_FUSION_FLAG}=1 was set"
    if value is None:
        environ[TE_FUSION_FLAG] = "1"
        return None
    if not value.isdecimal() or int(value) == 0:
        return f"{TE_FUSION_FLAG}={value} in the environment turns it off; unset it"
    return None


def resolve_device(device: str, local_rank: int, local_world_size: int = 1) -> torch.device:
    """Choose this rank's device; the same kind for every rank of a host.

    Args:
        device: `cpu`, `cuda`, or `auto`, which is CUDA where this host has a GPU for each local rank.
        local_rank: Rank on this host; the GPU's index.
        local_world_size: Ranks on this host.

    Returns:
        The device.

    Raises:
        ConfigError: CUDA was asked for, and the host has too few GPUs; on each of its ranks.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = num_gpus >= max(local_world_size, 1)
    if device == "cuda" and not enough:
        error = ConfigError(
            f"device=cuda: the host has {num_gpus} GPUs for {local_world_size} ranks. "
            f"Start at most {num_gpus} ranks a host, or set device=cpu."
        )
        # Other hosts may have enough, so that rank 0 cannot speak for this one.
        error.said_elsewhere = local_rank != 0
        raise error
    if device == "auto" and num_gpus and not enough and local_rank == 0:
        logger.warning("device=auto: cpu, since the host has %d GPUs for %d ranks", num_gpus, local_world_size)
    return torch.device("cuda", local_rank) if device != "cpu" and enough and num_gpus else torch.device("cpu")


@contextlib.contextmanager
def start(
    launch: LaunchEnvironment, device: str, *, deterministic: bool = False, timeout_s: float = 1800.0
) -> Iterator[Runtime]:
    """Start the process group (gloo on CPU, NCCL on CUDA) and end it after the block.

    Args:
        launch: Where this process stands.
        device: `auto`, `cpu` or `cuda`.
        deterministic: Refuse operations that are not bit-reproducible.
        timeout_s: Longest wait for one collective, in seconds.

    Yields:
        The runtime.

    Raises:
        ConfigError: See `resolve_device`.

    Collective: the world; every rank must call.
    """
    if deterministic:
        # cuBLAS reads it when it starts; without it, torch refuses its products as not reproducible.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name, value in FLIGHT_RECORDER_SIZE.items():
        os.environ.setdefault(name, value)
    import torch
    import torch.distributed as dist

    # Its functions take the default group as a default argument, evaluated at import. Imported after the group is
    # made (torch does so itself, at the first dispatch mode), it keeps the group alive past its destruction, and
    # gloo's threads then can abort the process at exit (torch 2.11).
    import torch.distributed.nn.functional

    torch.use_deterministic_algorithms(deterministic)
    torch_device = resolve_device(device, launch.local_rank, launch.local_world_size)
    on_cuda = torch_device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(torch_device)
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    timeout = timedelta(seconds=timeout_s)
    device_id = torch_device if on_cuda else None
    dist.init_process_group(
        backend,
        store=_store(launch, timeout),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device_id,
    )
    try:
        checkpoint_group = dist.new_group(backend="gloo", timeout=timeout)
        yield Runtime(launch, torch_device, checkpoint_group)  # pyright: ignore[reportArgumentType]
        # Without this barrier a rank may tear gloo's connections down while another is still in its last
        # collective, and abort it (seen with torch 2.11).
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _store(launch: LaunchEnvironment, timeout: timedelta) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
    """The store through which the ranks meet."""
    import torch.distributed as dist

    if not launch.launched:
        return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    method = launch.init_method or "env://"
    meet = dist.rendezvous  # pyright: ignore[reportPrivateImportUsage]
    store, _, _ = next(meet(method, launch.rank, launch.world_size, timeout=timeout))
    # torchrun's agent keeps its store over restarts, with the addresses of ranks that are gone (torch 2.11).
    return dist.PrefixStore(f"start {launch.num_restarts}", store)  # pyright: ignore[reportPrivateImportUsage]


def set_timeouts(timeout_s: float) -> None:
    """Set the longest wait of every process group of this rank: a mesh's have torch's own, ten minutes on NCCL.

    Args:
        timeout_s: Seconds.
    """
    from torch.distributed import distributed_c10d

    # Private in torch 2.11, where a mesh takes no timeout.
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, distributed_c10d.ProcessGroup):
            distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
