"""The entry reports a user's mistakes the same way on every rank, before torch is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

import train_fsdp2_ep
from moe_framework.config.command_line import parse_command_line
from moe_framework.config.schema import Config
from moe_framework.distributed.runtime import launch_environment
from moe_framework.errors import CheckpointError, ConfigError, DataError, MoeFrameworkError

ROOT = Path(__file__).resolve().parents[3]
BAD = ["--config-name", "L0_sanity", "parallel.ep=3", "model.top_k=9", "train.global_batch_size=31"]


def be_rank(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list that collects the waits of silent ranks, which do not wait here."""
    waited: list[float] = []
    monkeypatch.setattr(train_fsdp2_ep.time, "sleep", waited.append)
    return waited


def test_every_rank_raises_the_same_error(monkeypatch: pytest.MonkeyPatch):
    texts = set()
    for rank in range(4):
        be_rank(rank, 4, monkeypatch)
        with pytest.raises(ConfigError) as caught:
            train_fsdp2_ep.load_valid_config(parse_command_line(BAD), launch_environment())
        texts.add(str(caught.value))
    (text,) = texts
    assert text.count("\n") == 2


def test_rank_0_prints_one_line_per_violation_and_the_others_wait_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], delays: list[float]
):
    for rank in range(4):
        be_rank(rank, 4, monkeypatch)
        assert train_fsdp2_ep.main(BAD) == 2
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert out == ""
        assert len(lines) == (3 if rank == 0 else 0)
        assert all(line.startswith("ConfigError: ") for line in lines)
    assert delays == [train_fsdp2_ep.SILENT_EXIT_DELAY_S] * 3


@pytest.mark.parametrize("kind", [DataError, ConfigError])
def test_error_of_one_rank_is_printed_by_that_rank(kind: type[MoeFrameworkError], capsys, delays: list[float]):
    train_fsdp2_ep.report(kind("data.path=/x.fa: ended early."), rank=3)
    assert capsys.readouterr().err == f"[rank 3] {kind.__name__}: data.path=/x.fa: ended early.\n"
    assert delays == []


@pytest.mark.parametrize("kind", [DataError, CheckpointError])
def test_error_that_another_rank_says_is_not_printed_again(kind: type[MoeFrameworkError], capsys, delays: list[float]):
    error = kind("step_00000200: damaged.")
    error.said_elsewhere = True
    train_fsdp2_ep.report(error, rank=3)
    assert capsys.readouterr().err == ""
    assert delays == [train_fsdp2_ep.SILENT_EXIT_DELAY_S]


def test_error_that_only_one_rank_finds_when_the_ranks_start_is_printed(monkeypatch, capsys, delays: list[float]):
    def run(_: Config) -> int:
        raise ConfigError("device=cuda: the host has 0 GPUs for 1 ranks.")

    monkeypatch.setattr("moe_framework.train.run.run", run)
    be_rank(1, 2, monkeypatch)
    assert train_fsdp2_ep.main(["--config-name", "L0_sanity"]) == 2
    assert capsys.readouterr().err.startswith("[rank 1] ConfigError: device=cuda: the host has 0 GPUs")


def test_broken_launcher_environment_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    be_rank(0, 2, monkeypatch)
    monkeypatch.delenv("MASTER_PORT")
    assert train_fsdp2_ep.main(["--config-name", "L0_sanity"]) == 2
    assert "MASTER_PORT" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--help"], ["--config-name", "L0_sanity", "--cfg", "job"]])
def test_only_rank_0_prints_what_was_asked_for(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for rank in range(2):
        be_rank(rank, 2, monkeypatch)
        assert train_fsdp2_ep.main(flags) == 0
        assert (capsys.readouterr().out != "") == (rank == 0)


def test_valid_configuration_is_resolved_for_the_launched_ranks(monkeypatch: pytest.MonkeyPatch):
    be_rank(1, 4, monkeypatch)
    command_line = parse_command_line(["--config-name", "L0_sanity"])
    config = train_fsdp2_ep.load_valid_config(command_line, launch_environment())
    assert isinstance(config, Config)
    assert config.parallel.dp == 2


def test_plan_for_another_machine_ignores_the_launched_ranks():
    arguments = ["--config-name", "L0_sanity", "hardware.target=h100", "train.dry_run=true", "parallel.dp=2"]
    config = train_fsdp2_ep.load_valid_config(parse_command_line(arguments), launch_environment({}))
    assert config.parallel.dp == 2


def test_validation_imports_no_torch():
    program = (
        "import sys\n"
        "import train_fsdp2_ep as entry\n"
        "launch = entry.launch_environment({})\n"
        "line = entry.parse_command_line(['--config-name', 'L0_sanity', 'parallel.ep=1'])\n"
        "assert entry.load_valid_config(line, launch).parallel.dp == 1\n"
        "assert entry.main(['--config-name', 'L0_sanity', 'optim.lr=x']) == 2\n"
        "assert entry.main(['--config-name', 'L0_sanity', '--cfg', 'job']) == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert 'numpy' not in sys.modules, 'numpy was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
