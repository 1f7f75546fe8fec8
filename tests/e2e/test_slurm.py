"""The launchers on a real Slurm of two emulated nodes: preempted, hung and killed runs go on as if nothing had been."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_framework.errors import ExitCode
from tests.distributed import train_jobs as jobs
from tests.helpers.pool import RankPool
from tests.helpers.processes import processes_with
from tests.helpers.slurm import Slurm, private_slurm, wait_for, why_not_installable
from tests.helpers.tiny_runs import ROOT, arguments, losses, step_numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MAX_STEPS = 150
SIZE = {"max_steps": MAX_STEPS, "every": 5}
OVERRIDES = ("parallel.ep=2", "train.log_every=10")
START_TIMEOUT_S = 240.0
END_TIMEOUT_S = 420.0

RANKS = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

# A step takes a fraction of a second here, so that a rank that is silent for so long does hang.
TIMEOUTS = {"FT_TIMEOUT": "20", "FT_FIRST_TIMEOUT": "120"}


@dataclass(frozen=True)
class Job:
    """A submitted job, and the run that it trains.

    Attributes:
        slurm: Where it was submitted.
        number: Its number.
        folder: Holds the run's folder `run`, the job's output and its temporary folder.
    """

    slurm: Slurm
    number: int
    folder: Path

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @property
    def output(self) -> str:
        """What the job printed."""
        path = self.folder / "job.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def starts(self) -> list[dict]:
        """The starts that run.json has."""
        path = self.run / "run.json"
        return json.loads(path.read_text())["starts"] if path.exists() else []

    def rank(self, number: int) -> int:
        """Process id of a rank; its children have its variables, and higher ids."""
        return min(processes_with(RANK=str(number), SLURM_JOB_ID=str(self.number)))

    def wait_for_step(self, step: int, *, start: int = 1) -> None:
        """Wait until a start has done a step, which a job that ended never will."""

        def reached() -> bool:
            assert not self.slurm.has_ended(self.number), self.output
            end = time.monotonic() + 2.0
            # Often, because where steps are short, much of the run would otherwise have passed by.
            while not (done := len(self.starts()) >= start and _last_step(self.run) >= step):
                if time.monotonic() > end:
                    break
                time.sleep(0.02)
            return done

        wait_for(reached, timeout_s=START_TIMEOUT_S, what=lambda: f"step {step} of start {start}:\n{self.output}")

    def wait(self) -> dict[str, str]:
        """Wait for the end, and return the job's fields."""
        try:
            return self.slurm.wait_until_ended(self.number, timeout_s=END_TIMEOUT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if reason := why_not_installable():
        pytest.skip(reason)
    with private_slurm() as started:
        yield started


@pytest.fixture(scope="module")
def expected(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    ended = ranks.run(jobs.command, 2, arguments(folder, *OVERRIDES, **SIZE), timeout_s=240)
    assert [one.code for one in ended] == [0, 0], ended
    return losses(folder / "run")


@pytest.fixture
def submit(slurm: Slurm, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Submits a launcher for the tiny run, and at last checks that the job has left nothing behind."""
    submitted: list[Job] = []
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    own = {
        "NPROC_PER_NODE": "1",
        "PYTHON": sys.executable,
        "LOG_DIR": str(tmp_path / "logs"),
        "TMPDIR": str(temporary),
        # torch makes the folder of its compiler's cache whether it compiles or not.
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }

    def submit_run(launcher: str, *changes: str, **environ: str) -> Job:
        command = ["sbatch", "--parsable", "--time=60", f"--output={tmp_path / 'job.out'}", f"launchers/{launcher}"]
        run = arguments(tmp_path, *OVERRIDES, *changes, **SIZE)
        number = slurm.command(*command, *run, cwd=ROOT, environ=RANKS | own | environ)
        submitted.append(Job(slurm, int(number), tmp_path))
        return submitted[-1]

    yield submit_run
    for job in submitted:
        left = processes_with(SLURM_JOB_ID=str(job.number))
        assert not left, f"processes of job {job.number} are left: {left}"
        assert _listening(ports_of(job)) == []
    assert [path.name for path in temporary.iterdir()] == []
    assert not list(tmp_path.rglob("exit_code"))


def ports_of(job: Job) -> list[int]:
    """The ports that the launchers choose for the first starts of a job."""
    return [10000 + (job.number + 1009 * start) % 20000 for start in range(4)]


def _listening(ports: list[int]) -> list[int]:
    found = []
    for port in ports:
        with socket.socket() as client, contextlib.suppress(OSError):
            client.connect(("127.0.0.1", port))
            found.append(port)
    return found


def _last_step(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    # The last line may be half written.
    return max((json.loads(line)["step"] for line in lines[-3:-1]), default=0)


def check_whole(job: Job, expected: dict[int, float], *, starts: int, requeued: int) -> None:
    """Check that a job has trained every step once, with the losses of the run that nothing interrupts."""
    ended = job.wait()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", str(requeued)), job.output
    assert len(job.starts()) == starts
    assert losses(job.run) == expected


def test_a_preempted_run_is_saved_requeued_and_goes_on(submit, expected: dict[int, float]):
    job = submit("slurm_train.sbatch")
    job.wait_for_step(10)
    job.slurm.command("scancel", "--batch", "--signal=USR1", str(job.number))
    check_whole(job, expected, starts=2, requeued=1)
    first, second = job.starts()
    assert first["ended"]["code"] == ExitCode.STOPPED
    assert second["step"] == first["ended"]["step"] >= 10
    assert "[rank 1] stopped on request" in job.output
    logs = [path.relative_to(job.folder / "logs" / str(job.number)) for path in job.folder.rglob("stderr.log")]
    assert sorted(path.parts[0] for path in logs) == ["node0", "node0", "node1", "node1"]


def test_a_request_to_stop_before_any_rank_listens_is_obeyed_once(submit, expected: dict[int, float]):
    job = submit("slurm_train.sbatch")
    logs = job.folder / "logs" / str(job.number)
    wait_for(logs.is_dir, timeout_s=START_TIMEOUT_S, what=lambda: job.output)
    job.slurm.command("scancel", "--batch", "--signal=USR1", str(job.number))
    check_whole(job, expected, starts=2, requeued=1)
    first, second = job.starts()
    assert (first["step"], first["ended"]["code"], first["ended"]["step"]) == (0, ExitCode.STOPPED, 0)
    assert second["step"] == 0
    assert not (logs / "stop").exists()


def test_a_run_whose_ranks_die_hang_and_are_preempted_goes_on_each_time(submit, expected: dict[int, float]):
    job = submit("slurm_ft.sbatch", **TIMEOUTS)
    job.wait_for_step(10)
    wait_for(lambda: step_numbers(job.run), timeout_s=START_TIMEOUT_S, what=lambda: f"a save:\n{job.output}")
    os.kill(job.rank(1), signal.SIGKILL)
    job.wait_for_step(40, start=2)
    os.kill(job.rank(1), signal.SIGSTOP)
    job.wait_for_step(70, start=3)
    job.slurm.command("scancel", "--signal=USR1", str(job.number))
    check_whole(job, expected, starts=4, requeued=1)
    died, hung, stopped, last = job.starts()
    # Whether rank 0 got to say so before it was ended as well, or not.
    assert [(start["ended"] or {"code": 1})["code"] for start in (died, hung)] == [1, 1]
    assert 0 < hung["step"] < hung["died_in_step"] < MAX_STEPS
    assert hung["step"] < stopped["step"] < stopped["died_in_step"] < MAX_STEPS
    assert stopped["ended"]["code"] == ExitCode.STOPPED
    assert last["step"] == stopped["ended"]["step"]
    assert "Did not get subsequent heartbeat" in job.output


def test_more_faults_than_restarts_end_the_job_with_a_code(submit):
    job = submit("slurm_ft.sbatch", MAX_RESTARTS="0", **TIMEOUTS)
    job.wait_for_step(5)
    os.kill(job.rank(0), signal.SIGKILL)
    ended = job.wait()
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "1:0", "0")


def test_a_cancelled_job_saves_and_stays_cancelled(submit):
    job = submit("slurm_train.sbatch", "checkpoint.every=0")
    job.wait_for_step(5)
    job.slurm.command("scancel", str(job.number))
    wait_for(lambda: not processes_with(SLURM_JOB_ID=str(job.number)), timeout_s=60, what=lambda: job.output)
    ended = job.wait()
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    (start,) = job.starts()
    assert start["ended"]["code"] == ExitCode.STOPPED
    assert step_numbers(job.run) == [start["ended"]["step"]]


def test_srun_alone_starts_the_ranks_and_passes_the_signal_and_their_code_on(
    slurm: Slurm, expected: dict[int, float], tmp_path: Path
):
    command = ["srun", "--nodes=2", "--ntasks=2", sys.executable, "train_fsdp2_ep.py"]
    log = tmp_path / "srun.out"
    # The emulated nodes' names are no hosts.
    own = RANKS | {"MASTER_ADDR": "127.0.0.1"}
    with (
        log.open("w") as output,
        subprocess.Popen(
            [*command, *arguments(tmp_path, *OVERRIDES, **SIZE)],
            cwd=ROOT,
            env=slurm.environ | own,
            stdout=output,
            stderr=output,
        ) as srun,
    ):
        try:
            wait_for(lambda: _last_step(tmp_path / "run") >= 10, timeout_s=START_TIMEOUT_S, what=log.read_text)
            srun.send_signal(signal.SIGUSR1)
            assert srun.wait(60) == ExitCode.STOPPED, log.read_text()
        finally:
            srun.kill()
    done = losses(tmp_path / "run")
    assert 10 <= len(done) < MAX_STEPS
    assert done == {step: expected[step] for step in done}
    assert step_numbers(tmp_path / "run")[-1] == len(done)


def test_the_tasks_of_a_step_have_ranks_and_a_batch_script_is_one(slurm: Slurm, tmp_path: Path):
    show = "from moe_framework.distributed.runtime import *; p = launch_environment(); print(p.launched, p.rank, "
    show += "p.local_rank, p.world_size, p.local_world_size, p.init_method, sep='|')"
    output = tmp_path / "shown"
    tasks = slurm.command("srun", "--nodes=2", "--ntasks=3", sys.executable, "-c", show, cwd=ROOT)
    lines = sorted(tasks.splitlines())
    meeting = {line.split("|")[-1] for line in lines}
    assert [line.rpartition("|")[0] for line in lines] == ["True|0|0|3|2", "True|1|1|3|2", "True|2|0|3|1"]
    assert len(meeting) == 1
    assert meeting.pop().startswith("tcp://n1:")
    script = f'#!/bin/bash\n{sys.executable} -c "{show}"\n'
    (tmp_path / "script").write_text(script)
    job = slurm.command("sbatch", "--parsable", "--ntasks=3", f"--output={output}", str(tmp_path / "script"), cwd=ROOT)
    assert slurm.wait_until_ended(int(job), timeout_s=60)["JobState"] == "COMPLETED", output.read_text()
    assert output.read_text() == "False|0|0|1|1|None\n"


def test_a_private_slurm_leaves_nothing(slurm: Slurm):
    with private_slurm() as other:
        folder, ports = other.folder, other.ports
        assert other.command("srun", "--nodes=2", "hostname").splitlines() == [socket.gethostname()] * 2
        configuration = other.environ["SLURM_CONF"]
        assert len(processes_with(SLURM_CONF=configuration)) >= 4
    assert not folder.exists()
    assert processes_with(SLURM_CONF=configuration) == []
    assert _listening(ports) == []
    # The first one goes on.
    assert subprocess.run(["sinfo"], env=slurm.environ, capture_output=True, check=False).returncode == 0
