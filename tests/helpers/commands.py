"""The documented commands as processes: started on a free port, found by rank, and never left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.tiny_runs import ROOT

SCRIPT = "train_fsdp2_ep.py"


@dataclass(frozen=True)
class Command:
    """A started command.

    Attributes:
        process: The process itself: torchrun, or the only rank.
        log: File with all that the ranks print.
    """

    process: subprocess.Popen
    log: Path

    @property
    def output(self) -> str:
        """What was printed so far."""
        return self.log.read_text(errors="replace")

    def ranks(self) -> dict[int, int]:
        """Process id of each rank that torchrun has started and that is alive."""
        found = {}
        for pid in _children(self.process.pid):
            rank = _environment(pid).get("RANK")
            if rank is not None:
                found[int(rank)] = pid
        return found

    def wait(self, timeout_s: float) -> int:
        """Return the exit code; a command that takes longer is an error with its output."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.output}") from None

    def kill(self) -> None:
        """End the command and all its descendants at once; torchrun's ranks are in sessions of their own."""
        pids = [self.process.pid]
        for pid in pids:
            pids += _children(pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def started(command: list[str], log: Path) -> Iterator[Command]:
    """Start a command in the repository's root and kill what is left of it after the block.

    Args:
        command: Program and arguments.
        log: File for its standard output and error.

    Yields:
        It.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    # torchrun reads PET_MASTER_PORT as its --master-port, so that the command itself stays as documented.
    environment = os.environ | {"PET_MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    running = Command(process, log)
    try:
        yield running
    finally:
        running.kill()


def torchrun(num_ranks: int, arguments: list[str], script: str = SCRIPT) -> list[str]:
    """Return the documented command for several ranks."""
    return [str(Path(sys.executable).with_name("torchrun")), f"--nproc_per_node={num_ranks}", script, *arguments]


def python(arguments: list[str]) -> list[str]:
    """Return the documented command for one rank."""
    return [sys.executable, SCRIPT, *arguments]


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # After the last parenthesis, because the name before it may hold anything.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent and fields[0] != "Z":
                    found.append(int(entry.name))
    return found


def _environment(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
