"""The launchers with stand-ins for Python and for Slurm's commands, which record how they were called."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers.tiny_runs import ROOT

SBATCH = ("slurm_train.sbatch", "slurm_ft.sbatch")
TRICKY = ["--config-name", "L0_sanity", "run.name=two words", "a='b'", 'c="d"', "*", "$HOME", "", "--nnodes=9", "\\"]

# Records its arguments, ends with the code asked for, and acts as an agent whose ranks stop on request if told to.
# In a job step it gets SIGUSR1, as every process of a real one does.
PYTHON = """\
printf '%s\\0' "$@" > "$FAKES/python.$SLURM_NODEID"
[[ -z ${SLURMD_NODENAME:-} ]] || kill -USR1 $$
[[ -z ${FAKE_EXIT_FILE:-} ]] || echo "$FAKE_EXIT_FILE" > "$MOE_EXIT_FILE"
[[ $1 != -c ]] || echo "${FAKE_GPUS:-0}"
exit "${FAKE_CODE:-0}"
"""

# Runs the command for each of two nodes in turn, or waits for the signal that the batch script passes on, together with
# the file for ranks that don't listen yet.
SRUN = """\
printf '%s\\0' "$@" > "$FAKES/srun.arguments"
[[ ! -e $MOE_STOP_FILE ]] || touch "$FAKES/stop_when_started"
if [[ -n ${FAKE_WAIT:-} ]]; then
    trap '[[ -e $MOE_STOP_FILE ]] && told=heard; echo ${told:-"heard, without the file"} >> "$FAKES/signals"' USR1
    touch "$FAKES/waiting"
    for _ in {1..100}; do [[ -f $FAKES/go ]] && exit 5; sleep 0.05; done
    exit 6
fi
while [[ $1 == --* ]]; do shift; done
code=0
for node in 0 1; do SLURM_NODEID=$node SLURMD_NODENAME=n$node "$@" || code=$?; done
exit $code
"""

SCONTROL = """\
if [[ -n ${FAKE_SLOW:-} && $1 == show ]]; then
    touch "$FAKES/waiting"
    for _ in {1..100}; do [[ -f $FAKES/go ]] && break; sleep 0.05; done
fi
case "$1 $2" in
    "show hostnames") printf 'n0\\nn1\\n' ;;
    "show node") echo "   NodeAddr=10.0.0.${3#n} NodeHostName=$3 Version=22" ;;
    requeue*) echo "$2" > "$FAKES/requeued" ;;
    *) exit 9 ;;
esac
"""

SQUEUE = """\
echo "${FAKE_STATE:-RUNNING}"
"""

JOB = {"SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_GPUS_ON_NODE": "4"}


@dataclass
class Fakes:
    """A folder of stand-ins, the first on PATH.

    Attributes:
        folder: Where they are, and where they record.
        environ: Variables of the launcher.
    """

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    def run(self, launcher: str, *arguments: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a launcher to its end."""
        command = ["bash", str(ROOT / "launchers" / launcher), *arguments]
        variables = self.environ | environ
        return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=60, check=False)

    def recorded(self, name: str) -> list[str]:
        """Return the arguments of the last call of a stand-in."""
        return (self.folder / name).read_text().split("\0")[:-1]

    @property
    def requeued(self) -> str | None:
        """The job that was requeued."""
        path = self.folder / "requeued"
        return path.read_text().strip() if path.exists() else None


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    folder = tmp_path / "fakes"
    folder.mkdir()
    for name, text in {"python": PYTHON, "srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE}.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    own = {"PATH": path, "FAKES": str(folder), "PYTHON": str(folder / "python"), "LOG_DIR": str(tmp_path / "logs")}
    return Fakes(folder, own | JOB)


def options(arguments: list[str]) -> dict[str, str]:
    """The options before the script's name."""
    own = arguments[: arguments.index("train_fsdp2_ep.py")]
    return dict(option.removeprefix("--").split("=", 1) for option in own if option.startswith("--"))


def test_torchrun_sh_passes_every_argument_unchanged(fakes: Fakes):
    done = fakes.run("torchrun.sh", *TRICKY, NPROC_PER_NODE="2", SLURM_NODEID="0")
    assert done.returncode == 0, done.stderr
    arguments = fakes.recorded("python.0")
    assert arguments[:4] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert arguments[4:] == [str(ROOT / "train_fsdp2_ep.py"), *TRICKY]


def test_torchrun_sh_starts_a_rank_for_each_gpu(fakes: Fakes):
    assert fakes.run("torchrun.sh", SLURM_NODEID="0", FAKE_GPUS="8").returncode == 0
    assert "--nproc-per-node=8" in fakes.recorded("python.0")


def test_torchrun_sh_says_what_to_set_without_gpus(fakes: Fakes):
    done = fakes.run("torchrun.sh", SLURM_NODEID="0", FAKE_GPUS="0")
    assert done.returncode == 2
    assert "no GPU is visible here. Set NPROC_PER_NODE" in done.stderr


@pytest.mark.parametrize("launcher", SBATCH)
def test_every_node_gets_every_argument_unchanged(launcher: str, fakes: Fakes):
    done = fakes.run(launcher, *TRICKY)
    assert done.returncode == 0, done.stderr
    for node in (0, 1):
        arguments = fakes.recorded(f"python.{node}")
        assert arguments[arguments.index("train_fsdp2_ep.py") + 1 :] == TRICKY


def test_each_nodes_agent_knows_its_place(fakes: Fakes):
    fakes.run("slurm_train.sbatch")
    first, second = (options(fakes.recorded(f"python.{node}")) for node in (0, 1))
    assert first["node-rank"] == "0"
    assert second["node-rank"] == "1"
    assert second["nnodes"] == "2"
    assert second["nproc-per-node"] == "4"
    assert second["master-addr"] == "10.0.0.0"
    assert second["master-port"] == first["master-port"]
    assert second["log-dir"].endswith("logs/42/node1")


def test_each_nodes_ft_launcher_knows_its_place(fakes: Fakes):
    fakes.run("slurm_ft.sbatch", FT_TIMEOUT="7", MAX_RESTARTS="2")
    first, second = (options(fakes.recorded(f"python.{node}")) for node in (0, 1))
    assert first["rdzv-conf"] == "is_host=1"
    assert second["rdzv-conf"] == "is_host=0"
    assert second["local-addr"] == "10.0.0.1"
    assert second["rdzv-endpoint"] == first["rdzv-endpoint"]
    assert first["rdzv-endpoint"].startswith("10.0.0.0:")
    assert second["ft-rank-heartbeat-timeout"] == "7"
    assert second["max-restarts"] == "2"


@pytest.mark.parametrize("launcher", SBATCH)
def test_a_start_after_a_requeue_has_another_port(launcher: str, fakes: Fakes):
    fakes.run(launcher)
    before = fakes.recorded("python.0")
    fakes.run(launcher, SLURM_RESTART_COUNT="1")
    changed = set(before) ^ set(fakes.recorded("python.0"))
    assert {option.split("=")[0] for option in changed} in ({"--master-port"}, {"--rdzv-endpoint"})


def test_srun_starts_one_agent_on_each_node_and_ends_all_soon_after_one(fakes: Fakes):
    fakes.run("slurm_train.sbatch")
    assert {"--nodes=2", "--ntasks=2", "--wait=30"} <= set(fakes.recorded("srun.arguments"))


def test_srun_gets_the_cpus_that_were_given_to_sbatch(fakes: Fakes):
    (fakes.folder / "srun").write_text('#!/usr/bin/env bash\necho "$SRUN_CPUS_PER_TASK" > "$FAKES/cpus"\n')
    fakes.run("slurm_train.sbatch", SLURM_CPUS_PER_TASK="12")
    assert (fakes.folder / "cpus").read_text() == "12\n"


@pytest.mark.parametrize("launcher", SBATCH)
def test_a_failed_step_ends_the_job_with_its_code(launcher: str, fakes: Fakes):
    assert fakes.run(launcher, FAKE_CODE="3").returncode == 3
    assert fakes.requeued is None


@pytest.mark.parametrize("launcher", SBATCH)
@pytest.mark.parametrize("code", ["0", "1"])
def test_a_stop_on_request_is_requeued(launcher: str, code: str, fakes: Fakes):
    # Some agents take a signal that they have passed on for a failure of their own.
    assert fakes.run(launcher, FAKE_EXIT_FILE="75", FAKE_CODE=code).returncode == 75
    assert fakes.requeued == "42"


def test_a_job_that_is_being_cancelled_is_not_requeued(fakes: Fakes):
    assert fakes.run("slurm_train.sbatch", FAKE_EXIT_FILE="75", FAKE_STATE="COMPLETING").returncode == 75
    assert fakes.requeued is None


def test_what_an_earlier_start_left_in_the_exit_file_does_not_count(fakes: Fakes):
    left = Path(fakes.environ["LOG_DIR"]) / "42/exit_code"
    left.parent.mkdir(parents=True)
    left.write_text("75\n")
    assert fakes.run("slurm_train.sbatch").returncode == 0
    assert fakes.requeued is None


def stop_files(fakes: Fakes) -> list[Path]:
    return list(Path(fakes.environ["LOG_DIR"]).rglob("stop*"))


@pytest.mark.parametrize("launcher", SBATCH)
def test_a_stop_request_of_an_earlier_start_does_not_count(launcher: str, fakes: Fakes):
    left = Path(fakes.environ["LOG_DIR"]) / "42/stop"
    left.parent.mkdir(parents=True)
    left.touch()
    assert fakes.run(launcher, SLURM_RESTART_COUNT="1").returncode == 0
    assert not (fakes.folder / "stop_when_started").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize("launcher", SBATCH)
def test_a_stop_request_is_kept_for_ranks_that_do_not_listen_yet(launcher: str, number: int, fakes: Fakes):
    command = ["bash", str(ROOT / "launchers" / launcher)]
    with subprocess.Popen(command, cwd=ROOT, env=fakes.environ | {"FAKE_WAIT": "1"}) as script:
        wait_for(fakes.folder / "waiting")
        assert stop_files(fakes) == []
        script.send_signal(number)
        wait_for(fakes.folder / "signals")
        (kept,) = stop_files(fakes)
        (fakes.folder / "go").touch()
        assert script.wait(30) == 5
    assert (fakes.folder / "signals").read_text() == "heard\n"
    assert not kept.exists()
    fakes.run(launcher, SLURM_RESTART_COUNT="1")
    assert not (fakes.folder / "stop_when_started").exists()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_stop_request_before_the_step_is_kept_for_it(number: int, fakes: Fakes):
    command = ["bash", str(ROOT / "launchers/slurm_train.sbatch")]
    with subprocess.Popen(command, cwd=ROOT, env=fakes.environ | {"FAKE_SLOW": "1", "FAKE_EXIT_FILE": "75"}) as script:
        wait_for(fakes.folder / "waiting")
        script.send_signal(number)
        (fakes.folder / "go").touch()
        assert script.wait(30) == 75
    assert (fakes.folder / "stop_when_started").exists()
    assert fakes.requeued == "42"
    assert stop_files(fakes) == []


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_the_script_reaches_the_step_once_and_the_script_waits(number: int, fakes: Fakes):
    command = ["bash", str(ROOT / "launchers/slurm_train.sbatch")]
    with subprocess.Popen(command, cwd=ROOT, env=fakes.environ | {"FAKE_WAIT": "1"}) as script:
        wait_for(fakes.folder / "waiting")
        script.send_signal(number)
        wait_for(fakes.folder / "signals")
        for _ in range(3):
            script.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        assert script.poll() is None
        (fakes.folder / "go").touch()
        assert script.wait(30) == 5
    assert (fakes.folder / "signals").read_text() == "heard\n"


@pytest.mark.parametrize("launcher", SBATCH)
def test_elsewhere_than_in_the_repository_it_says_so(launcher: str, fakes: Fakes, tmp_path: Path):
    (tmp_path / "launchers").symlink_to(ROOT / "launchers")
    done = fakes.run(launcher, cwd=tmp_path)
    assert done.returncode == 2
    assert "has no train_fsdp2_ep.py" in done.stderr


@pytest.mark.parametrize("launcher", SBATCH)
def test_a_job_without_gpus_must_say_its_ranks(launcher: str, fakes: Fakes):
    done = fakes.run(launcher, SLURM_GPUS_ON_NODE="")
    assert done.returncode == 2
    assert "--gpus-per-node=N, or set NPROC_PER_NODE" in done.stderr


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)
