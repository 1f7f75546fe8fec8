"""How the documented command ends: when it is told to, when it is told twice, and when one rank raises."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from moe_framework.errors import ExitCode
from moe_framework.resilience.signals import SAME_REQUEST_S
from tests.helpers.commands import Command, started, torchrun
from tests.helpers.tiny_runs import arguments, losses, step_numbers
from tools.soaking.faults import EXCEPTION, Fault, write_plan

# The limit for all ranks once one has failed.
LIMIT_S = 30.0
FAULTY = "tools/soaking/rank.py"
EP2 = ("parallel.ep=2", "train.log_every=100")


def wait_for_steps(command: Command, run_dir: Path, count: int) -> None:
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        assert command.process.poll() is None, command.output
        assert time.monotonic() < deadline, command.output
        time.sleep(0.05)


def last_start(folder: Path) -> dict:
    return json.loads((folder / "run/run.json").read_text())["starts"][-1]


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_and_ends_and_a_second_signal_ends_at_once(tmp_path: Path):
    start = arguments(tmp_path, *EP2, max_steps=100_000, every=0)
    with started(torchrun(2, start), tmp_path / "first.log") as command:
        wait_for_steps(command, tmp_path / "run", 3)
        # torchrun passes it on to both ranks.
        command.process.send_signal(signal.SIGTERM)
        assert command.wait(60) != 0
        assert "stopped on request after step" in command.output
    (saved,) = step_numbers(tmp_path / "run")
    assert max(losses(tmp_path / "run")) == saved
    assert last_start(tmp_path)["ended"]["code"] == ExitCode.STOPPED

    with started(torchrun(2, start), tmp_path / "second.log") as command:
        wait_for_steps(command, tmp_path / "run", saved + 2)
        ranks = command.ranks()
        # A rank that waits for another one cannot reach the end of its step.
        os.kill(ranks[0], signal.SIGSTOP)
        os.kill(ranks[1], signal.SIGUSR1)
        time.sleep(SAME_REQUEST_S + 0.5)
        assert ranks[1] in command.ranks().values()
        os.kill(ranks[1], signal.SIGUSR1)
        deadline = time.monotonic() + 5
        while ranks[1] in command.ranks().values():
            assert time.monotonic() < deadline, command.output
            time.sleep(0.05)
        assert "SIGUSR1 after SIGUSR1: ends at once; the last published step is kept" in command.output
    assert step_numbers(tmp_path / "run") == [saved]


@pytest.mark.slow
def test_after_a_restart_by_torchrun_the_new_failure_is_told_and_signals_still_save(tmp_path: Path):
    plan, suffered = tmp_path / "plan.json", tmp_path / "suffered"
    suffered.mkdir()
    write_plan([Fault(number, EXCEPTION, rank=1, step=step) for number, step in enumerate((4, 7))], plan)
    start = arguments(tmp_path, *EP2, max_steps=100_000)
    command_line = torchrun(2, [str(plan), str(suffered), str(tmp_path / "run/checkpoints"), *start], FAULTY)
    with started([*command_line[:1], "--max-restarts=2", *command_line[1:]], tmp_path / "log") as command:
        wait_for_steps(command, tmp_path / "run", 8)
        for number in range(2):
            assert f"RuntimeError: planned fault {number} in layer 0" in command.output
        assert command.output.count("rank 1 failed:\nTraceback") == 2
        command.process.send_signal(signal.SIGTERM)
        command.wait(60)
        assert "stopped on request after step" in command.output
    reasons = [one["reason"] for one in json.loads((tmp_path / "run/run.json").read_text())["starts"]]
    told = [
        f"failed in step {step}: rank 1: RuntimeError: planned fault {n} in layer 0" for n, step in ((0, 4), (1, 7))
    ]
    assert reasons == ["first start", *told]
    assert last_start(tmp_path)["ended"]["code"] == ExitCode.STOPPED


def test_an_error_in_one_rank_ends_all_with_its_traceback_first(tmp_path: Path):
    plan, suffered = tmp_path / "plan.json", tmp_path / "suffered"
    suffered.mkdir()
    write_plan([Fault(number=0, kind=EXCEPTION, rank=1, step=4, layer=1)], plan)
    start = arguments(tmp_path, *EP2, max_steps=1000)
    command_line = torchrun(2, [str(plan), str(suffered), str(tmp_path / "run/checkpoints"), *start], FAULTY)
    with started(command_line, tmp_path / "log") as command:
        code = command.wait(120)
        ended = time.time()
        text = command.output
        assert not command.ranks()
    assert code == ExitCode.FAILED
    assert ended - json.loads((suffered / "0000.json").read_text())["time"] < LIMIT_S
    # The first traceback is the cause's, whatever the other rank still says before it is ended.
    first = text.index("Traceback (most recent call last)")
    assert text[:first].endswith("rank 1 failed:\n")
    assert text.index("RuntimeError: planned fault 0 in layer 1") < text.index("Traceback", first + 1)
    assert step_numbers(tmp_path / "run") == [3]
    assert last_start(tmp_path)["ended"]["error"] == "rank 1: RuntimeError: planned fault 0 in layer 1"
