"""A private Slurm of two emulated nodes on this machine, for the tests of the launchers.

It keeps everything it writes in one temporary folder, listens on free ports of its own, and leaves neither when it is
closed. Debian's packages are installed if they are missing, which only root can do.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel")
INSTALL_TIMEOUT_S = 240.0
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 60.0
NODES = ("n1", "n2")

# States that a job does not leave.
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

# cred_expire is also how long a requeued job waits before it starts again: two minutes, unless set.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
MinJobAge=3600
SchedulerParameters=sched_interval=2,batch_sched_delay=1,bf_interval=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=4
PartitionName=debug Nodes=n[1-2] Default=YES State=UP OverSubscribe=YES MaxTime=INFINITE
"""


class Slurm:
    """A running Slurm; `close` ends it.

    Args:
        folder: An empty folder of its own, with a short path, since it holds a socket.

    Raises:
        RuntimeError: It does not start; the message has its logs.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.ports = _adjacent_free_ports(1 + len(NODES))
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self.environ["PATH"] = _path()
        self.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def command(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> str:
        """Run one of Slurm's commands and return what it prints.

        Args:
            *arguments: Program and arguments.
            cwd: Where to run it.
            environ: More variables.

        Raises:
            AssertionError: It failed; the message has what it printed.
        """
        done = subprocess.run(
            [str(argument) for argument in arguments],
            cwd=cwd,
            env=self.environ | dict(environ or {}),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number: int) -> dict[str, str]:
        """Return the fields of a job, as `scontrol show job` names them."""
        shown = self.command("scontrol", "--oneliner", "show", "job", str(number))
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def has_ended(self, number: int) -> bool:
        """Whether a job has ended and is not going to be requeued."""
        return self.job(number)["JobState"] in ENDED

    def wait_until_ended(self, number: int, *, timeout_s: float) -> dict[str, str]:
        """Wait for the end of a job, and return its fields."""
        wait_for(
            lambda: self.has_ended(number),
            timeout_s=timeout_s,
            what=lambda: f"the end of job {number}: {self.job(number)}",
        )
        return self.job(number)

    def close(self) -> None:
        """End the jobs and the daemons, and remove the folder."""
        with contextlib.suppress(AssertionError, subprocess.SubprocessError):
            self._cancel_all()
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons = []
        shutil.rmtree(self.folder)

    def _start(self) -> None:
        folder = self.folder
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        configuration = CONFIGURATION.format(host=socket.gethostname(), ports=self.ports, folder=folder)
        (folder / "slurm.conf").write_text(configuration)
        munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        # It insists on a folder that every user may enter, unless forced.
        self._daemon("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge)
        self._wait(lambda: (folder / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        self._wait(self._is_idle, "two idle nodes")

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as output:
            # In a session of its own: an interrupt from the keyboard is for pytest, which then ends them in order.
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def _is_idle(self) -> bool:
        try:
            return self.command("sinfo", "--noheader", "--Node", "--format=%t").split() == ["idle"] * len(NODES)
        except AssertionError:
            return False

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(condition, timeout_s=START_TIMEOUT_S, what=lambda: f"{what}:\n{self._logs()}", error=RuntimeError)

    def _logs(self) -> str:
        paths = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in paths)

    def _cancel_all(self) -> None:
        def jobs() -> list[str]:
            return self.command("squeue", "--noheader", "--format=%i").split()

        if self._daemons and jobs():
            self.command("scancel", "--signal=KILL", "--full", *jobs())
            self.command("scancel", *jobs())
            wait_for(lambda: not jobs(), timeout_s=STOP_TIMEOUT_S, what=lambda: f"the end of jobs {jobs()}")


def wait_for[T](
    condition: Callable[[], T | None],
    *,
    timeout_s: float,
    what: Callable[[], str],
    error: type[Exception] = AssertionError,
    interval_s: float = 0.2,
) -> T:
    """Call a condition until what it returns is true, and return that.

    Args:
        condition: What is waited for.
        timeout_s: Longest wait, in seconds.
        what: Says what was waited for.
        error: What to raise.
        interval_s: Pause between two calls, in seconds.
    """
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end:
            raise error(f"waited {timeout_s:.0f} s for {what()}")
        time.sleep(interval_s)
    return value


def why_not_installable() -> str | None:
    """Install Slurm if it is missing; return why it is not there, or None."""
    if _missing():
        if os.geteuid() != 0:
            return f"Slurm is not installed ({', '.join(_missing())}), and only root can install it"
        install = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
        # The packages' scripts try to start services, which there is no need for.
        environ: Mapping[str, str] = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        try:
            subprocess.run(
                ["apt-get", "update"], env=environ, capture_output=True, timeout=INSTALL_TIMEOUT_S, check=False
            )
            subprocess.run(install, env=environ, capture_output=True, timeout=INSTALL_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return f"Slurm cannot be installed here: {error}"
    if os.geteuid() != 0:
        return "a private Slurm needs root, as its daemons do"
    return f"Slurm's packages lack {', '.join(_missing())}" if _missing() else None


@contextlib.contextmanager
def private_slurm() -> Iterator[Slurm]:
    """Start a Slurm, and end it after the block."""
    slurm = Slurm(Path(tempfile.mkdtemp(prefix="slurm_")))
    try:
        yield slurm
    finally:
        slurm.close()


def _path() -> str:
    """The daemons are in sbin, which is not on every PATH."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _missing() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]


def _adjacent_free_ports(number: int) -> list[int]:
    """Slurm numbers its nodes' ports in a row."""
    for _ in range(100):
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            ports = [first.getsockname()[1] + offset for offset in range(number)]
            try:
                for port in ports[1:]:
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return ports
    raise RuntimeError("no free ports in a row")
