import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_framework.errors import ConfigError
from moe_framework.train import lock
from moe_framework.train.lock import locked
from tests.helpers.tiny_runs import ROOT

# Takes the lock, starts a child in the way of `sys.argv[2]`, and waits. Who is ready last says the child's process id:
# a child that was only just forked has not let go of the lock yet.
HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from moe_framework.train.lock import locked

with locked("run.dir=runs", Path(sys.argv[1])):
    if sys.argv[2] == "none":
        print(0, flush=True)
    elif sys.argv[2] == "exec":
        print(subprocess.Popen(["sleep", "60"], close_fds=False).pid, flush=True)
    elif not os.fork():
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "WAIT_S", 0.0)
    monkeypatch.setattr(lock, "POLL_S", 0.01)


@contextmanager
def holder(folder: Path, child: str = "none") -> Iterator[tuple[subprocess.Popen, int]]:
    """Another process that has the folder, and the id of its child."""
    command = [sys.executable, "-c", HOLDER, str(folder), child]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        child_pid = int(process.stdout.readline())
        try:
            yield process, child_pid
        finally:
            process.kill()
            if child_pid:
                os.kill(child_pid, signal.SIGKILL)


def test_a_folder_in_use_is_refused_with_its_holder_and_the_remedy(tmp_path: Path):
    with holder(tmp_path) as (process, _), pytest.raises(ConfigError) as refused, locked("run.dir=runs", tmp_path):
        pass
    assert str(refused.value) == (
        f"run.dir=runs: {tmp_path} is in use by process {process.pid} on {socket.gethostname()}, and two runs in one "
        "folder would overwrite each other. Wait for that run, or end it, or set another run.name or "
        "checkpoint.ckpt_dir."
    )


@pytest.mark.parametrize("child", ["none", "fork", "exec"])
def test_a_killed_process_keeps_nothing_also_where_a_child_outlives_it(tmp_path: Path, child: str):
    with holder(tmp_path, child) as (process, child_pid):
        process.kill()
        process.wait()
        assert not child_pid or Path(f"/proc/{child_pid}").exists()
        with locked("run.dir=runs", tmp_path) as has_locks:
            assert has_locks


def test_a_child_takes_the_lock_away_from_no_one(tmp_path: Path):
    with locked("run.dir=runs", tmp_path):
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(ConfigError, match="is in use"), locked("run.dir=runs", tmp_path):
            pass


def test_it_waits_for_a_process_that_is_ending_and_says_so_once(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(lock, "WAIT_S", 30.0)
    with holder(tmp_path) as (process, _):
        threading.Timer(0.3, process.kill).start()
        started = time.monotonic()
        with locked("run.dir=runs", tmp_path):
            assert 0.1 < time.monotonic() - started < 10
    (told,) = caplog.messages
    assert told == (
        f"{tmp_path} is in use by process {process.pid} on {socket.gethostname()}; waits up to 30 s for it to end"
    )


def test_one_who_waited_for_a_folder_that_was_removed_has_the_new_one(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(lock, "WAIT_S", 30.0)
    folder, has_it, leave = tmp_path / "one", threading.Event(), threading.Event()

    def second() -> None:
        with locked("run.dir=runs", folder):
            has_it.set()
            leave.wait(30)

    waiting = threading.Thread(target=second)
    with locked("run.dir=runs", folder):
        waiting.start()
        time.sleep(0.2)
        (folder / lock.NAME).unlink()
        folder.rmdir()
    assert has_it.wait(30)
    monkeypatch.setattr(lock, "WAIT_S", 0.0)
    try:
        with pytest.raises(ConfigError, match="is in use"), locked("run.dir=runs", folder):
            pass
    finally:
        leave.set()
        waiting.join()


def test_it_is_free_after_the_block_and_names_nobody(tmp_path: Path):
    for _ in range(2):
        with locked("run.dir=runs", tmp_path):
            assert (tmp_path / lock.NAME).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    assert (tmp_path / lock.NAME).read_text() == ""


def test_a_refused_start_leaves_the_holders_name(tmp_path: Path):
    with locked("run.dir=runs", tmp_path):
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"process {os.getpid()} on "), locked("run.dir=runs", tmp_path):
                pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch, number: int):
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked("run.dir=runs", tmp_path) as one, locked("run.dir=runs", tmp_path) as other:
        assert (one, other) == (False, False)


def test_another_error_of_the_file_system_is_no_permission(tmp_path: Path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="I/O error"), locked("run.dir=runs", tmp_path):
        pass
