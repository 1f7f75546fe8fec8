"""The two runs of a soak: one without faults, one with them under a launcher that restarts the ranks."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from moe_framework.errors import ConfigError
from moe_framework.observe.progress import format_duration
from tools.soaking.faults import LARGEST_GAP, plan, read_suffered, write_plan
from tools.soaking.report import Soak, judge, losses

ROOT = Path(__file__).resolve().parents[2]
FT_LAUNCHER, TORCHRUN = LAUNCHERS = ("ft_launcher", "torchrun")
NUM_LAYERS = 4  # of L0_sanity

# L0_sanity with fewer rows a step, so that a step takes a fraction of a second on a CPU.
SETTINGS = (
    "device=cpu",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
    "train.log_every=1",
    "optim.warmup_steps=2",
    "eval.every=0",
    "data.heldout_fraction=0.01",
    "checkpoint.every=4",
    "checkpoint.keep=3",
    "resilience.max_failures_per_step=20",
    "resilience.hang_timeout_s=10",
)
# The launcher's own watch comes second, after the hang report.
HEARTBEAT_TIMEOUT_S, FIRST_HEARTBEAT_TIMEOUT_S = 25, 180
STOP_TIMEOUT_S = 3
PROGRESS_S = 20.0
LONGEST_RECOVERY_S = 120.0
LONGEST_STEP_S = 10.0


def default_launcher() -> str:
    """Return NVRx's launcher where the `resilience` extra is installed, or else torchrun."""
    return FT_LAUNCHER if importlib.util.find_spec("nvidia_resiliency_ext") else TORCHRUN


def soak(
    *, num_faults: int, seed: int, num_ranks: int, launcher: str, folder: Path | None, overrides: list[str]
) -> Soak:
    """Run without and with faults, and compare.

    Args:
        num_faults: How many.
        seed: Of the faults.
        num_ranks: Ranks; 2 to 4 are experts' owners, 1 has no other rank to wait for it.
        launcher: One of `LAUNCHERS`.
        folder: Where the runs are kept; None for a temporary folder.
        overrides: Changes to the configuration.

    Returns:
        What was found.

    Raises:
        ConfigError: The folder has runs already, or the run without faults failed.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak_")))
        elif folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"--folder={folder}: is not empty. Give a new folder.")
        suffered = folder / "suffered"
        suffered.mkdir(parents=True)
        faults = plan(num_faults, seed, num_ranks=num_ranks, num_layers=NUM_LAYERS)
        write_plan(faults, folder / "plan.json")
        steps = faults[-1].step + LARGEST_GAP
        arguments = ["--config-name", "L0_sanity", *SETTINGS, f"parallel.ep={num_ranks}", f"train.max_steps={steps}"]
        arguments += [f"run.dir={folder}", *overrides]

        _say(f"without faults: {steps} steps on {num_ranks} ranks")
        whole = _command(TORCHRUN, num_ranks, 0, ["train_fsdp2_ep.py", *arguments, "run.name=whole"])
        code, _ = _run(whole, folder / "whole.log", folder / "whole", steps, timeout_s=LONGEST_STEP_S * steps)
        if code != 0:
            raise ConfigError(f"the run without faults ended with code {code}:\n{_tail(folder / 'whole.log')}")

        _say(f"with {num_faults} faults, under {launcher}")
        script = ["tools/soaking/rank.py", str(folder / "plan.json"), str(suffered), str(folder / "soak/checkpoints")]
        command = _command(launcher, num_ranks, 3 * num_faults + 3, [*script, *arguments, "run.name=soak"])
        timeout_s = LONGEST_STEP_S * steps + LONGEST_RECOVERY_S * num_faults
        code, left_over = _run(command, folder / "soak.log", folder / "soak", steps, timeout_s=timeout_s)
        if code != 0:
            _say(_tail(folder / "soak.log"))
        left_over += [str(path) for path in sorted((folder / "soak").rglob("*tmp*"))]
        return judge(
            faults,
            read_suffered(suffered),
            launcher=launcher,
            seed=seed,
            exit_code=code,
            run_dir=folder / "soak",
            expected=losses(folder / "whole"),
            left_over=left_over,
        )


def _command(launcher: str, num_ranks: int, max_restarts: int, script: list[str]) -> list[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = ["--nnodes=1", f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}", "--rdzv-backend=c10d"]
    common += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=soak", "--local-addr=127.0.0.1"]
    if launcher == TORCHRUN:
        return [sys.executable, "-m", "torch.distributed.run", *common, "--monitor-interval=0.5", *script]
    watch = [
        f"--workers-stop-timeout={STOP_TIMEOUT_S}",
        "--ft-workload-check-interval=1",
        f"--ft-initial-rank-heartbeat-timeout={FIRST_HEARTBEAT_TIMEOUT_S}",
        f"--ft-rank-heartbeat-timeout={HEARTBEAT_TIMEOUT_S}",
    ]
    module = "nvidia_resiliency_ext.fault_tolerance.launcher"
    return [sys.executable, "-m", module, *common, "--monitor-interval=0.5", *watch, *script]


def _run(command: list[str], log: Path, run_dir: Path, steps: int, *, timeout_s: float) -> tuple[int, list[str]]:
    """Run a command to its end, with progress; return its exit code and the processes that it left behind."""
    mark = f"SOAK_MARK={uuid.uuid4().hex}"
    settings = [mark, "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", "PYTHONWARNINGS=ignore", "PYTHONPATH=" + str(ROOT)]
    began = time.monotonic()
    with log.open("w") as output, _ended_with_its_children(mark):
        process = subprocess.Popen(
            ["env", *settings, *command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PROGRESS_S)
            seconds = time.monotonic() - began
            if seconds > timeout_s:
                _say(f"not ended after {format_duration(seconds)}")
                os.killpg(process.pid, signal.SIGKILL)
            elif process.poll() is None and (done := max(losses(run_dir), default=0)):
                _say(f"step {done} of {steps}, about {format_duration(seconds / done * (steps - done))} left")
        return process.wait(), [_command_line(pid) for pid in _marked(mark)]


@contextlib.contextmanager
def _ended_with_its_children(mark: str) -> Iterator[None]:
    try:
        yield
    finally:
        for pid in _marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    """Processes that carry a mark in their environment, and so descend from the command."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                if alive and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _command_line(pid: int) -> str:
    try:
        return f"process {pid}: " + Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return f"process {pid}"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
