"""Ranks from Slurm's variables, for `srun python train_fsdp2_ep.py …` without torchrun.

Functions of a mapping: `runtime.py` alone reads the environment.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moe_framework.errors import ConfigError

# Slurm numbers the steps that `srun` starts from 0; a batch script, the shell of `salloc` and the step that adopts
# other processes have numbers from here on, where they have one (22.05 gives a batch script none).
FIRST_SPECIAL_STEP = 0xFFFFFFF0

# Below the range from which Linux gives ports to clients (32768 on), where a port may be taken by chance.
FIRST_PORT = 10_000
NUM_PORTS = 20_000


@dataclass(frozen=True)
class SlurmStep:
    """A process's place among the tasks of a job step, and where they meet.

    Attributes:
        rank: Global rank.
        local_rank: Rank on this host.
        world_size: Number of ranks.
        local_world_size: Number of ranks on this host.
        master_addr: Host of rank 0.
        master_port: Port that rank 0 listens on.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int


def slurm_step(environ: Mapping[str, str]) -> SlurmStep | None:
    """Read the place of a task that `srun` started together with others.

    MASTER_ADDR and MASTER_PORT win over what follows from Slurm's variables: the first node of the step, and a port
    that follows from the numbers of job, start and step.

    Args:
        environ: The variables.

    Returns:
        The place; None outside of a job step, and in a step of one task, such as `srun --pty bash`.

    Raises:
        ConfigError: A variable of a step is missing or malformed.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if "SLURM_PROCID" not in environ or not step.isdecimal() or int(step) >= FIRST_SPECIAL_STEP:
        return None
    world_size = _integer(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if world_size == 1:
        return None
    tasks_name, tasks = _first_of(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    _, nodes = _first_of(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST")
    node = _integer(environ, "SLURM_NODEID")
    counts = tasks_per_node(tasks, tasks_name)
    if node >= len(counts):
        raise ConfigError(f"environment: {tasks_name}={tasks} has no node SLURM_NODEID={node}. Start with srun.")
    port = environ.get("MASTER_PORT")
    return SlurmStep(
        rank=_integer(environ, "SLURM_PROCID"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=counts[node],
        master_addr=environ.get("MASTER_ADDR") or first_host(nodes),
        master_port=_integer(environ, "MASTER_PORT") if port else _port(environ, int(step)),
    )


def tasks_per_node(value: str, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Expand Slurm's count of tasks on each node.

    Args:
        value: Such as `4`, `2(x3),1` for [2, 2, 2, 1].
        name: The variable, for the error.

    Raises:
        ConfigError: It is malformed.
    """
    counts = []
    for part in value.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"environment: {name}={value} must look like 2(x3),1. Start with srun.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first name of Slurm's list of nodes, such as gpu07 of `gpu[07-09,12],cpu1`.

    Args:
        nodes: The list; a name may have several brackets.
    """
    # Up to the first comma that is not inside brackets.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def _port(environ: Mapping[str, str], step: int) -> int:
    """The same on every rank; another one for each job, each start of it, and each step.

    A start right after a requeue so does not meet a socket that the one before may have left.
    """
    job, start = _integer(environ, "SLURM_JOB_ID"), int(environ.get("SLURM_RESTART_COUNT", "0") or 0)
    return FIRST_PORT + (job + 1009 * start + 101 * step) % NUM_PORTS


def _integer(environ: Mapping[str, str], *names: str) -> int:
    name, value = _first_of(environ, *names)
    if not value.isdecimal():
        raise ConfigError(f"environment: {name}={value} must be a number. Start with srun.")
    return int(value)


def _first_of(environ: Mapping[str, str], *names: str) -> tuple[str, str]:
    for name in names:
        if name in environ:
            return name, environ[name]
    raise ConfigError(
        f"environment: {names[0]} not set although SLURM_STEP_ID and SLURM_PROCID are. "
        "Start with srun, or with torchrun inside the job."
    )
