import errno
import fcntl
import os
from pathlib import Path

import pytest

from moe_framework.config.schema import CheckpointConfig, Config, RunConfig
from moe_framework.errors import ConfigError, DataError
from moe_framework.train import lock
from moe_framework.train.folders import own_folders


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "WAIT_S", 0.0)


def config(directory: Path, *, name: str = "one", ckpt_dir: Path | None = None) -> Config:
    checkpoints = None if ckpt_dir is None else str(ckpt_dir)
    return Config(run=RunConfig(dir=str(directory), name=name), checkpoint=CheckpointConfig(ckpt_dir=checkpoints))


def enter(own: Config) -> None:
    with own_folders(own, is_main=True):
        pass


def test_the_folders_are_there_in_the_block(tmp_path: Path):
    with own_folders(config(tmp_path), is_main=True):
        assert (tmp_path / "one/checkpoints").is_dir()
    with own_folders(config(tmp_path, name="two", ckpt_dir=tmp_path / "a/b"), is_main=True):
        assert (tmp_path / "a/b").is_dir()
        assert not (tmp_path / "two/checkpoints").exists()


def test_a_second_run_of_the_same_name_is_refused_until_the_first_has_ended(tmp_path: Path):
    first, second = config(tmp_path), config(tmp_path, ckpt_dir=tmp_path / "elsewhere")
    message = rf"^run\.dir={tmp_path}: {tmp_path}/one is in use by process \d+ on "
    with own_folders(first, is_main=True), pytest.raises(ConfigError, match=message):
        enter(second)
    enter(second)


def test_a_second_run_with_the_same_checkpoints_is_refused_and_keeps_no_folder(tmp_path: Path):
    shared = tmp_path / "shared"
    first, second = (config(tmp_path, name=name, ckpt_dir=shared) for name in ("one", "two"))
    with own_folders(first, is_main=True):
        with pytest.raises(ConfigError, match=rf"^checkpoint\.ckpt_dir={shared}: {shared} is in use by "):
            enter(second)
        enter(config(tmp_path, name="two"))


def test_a_run_may_not_write_to_the_checkpoints_inside_of_another_ones_folder(tmp_path: Path):
    with own_folders(config(tmp_path), is_main=True), pytest.raises(ConfigError, match="checkpoints is in use by "):
        enter(config(tmp_path, name="two", ckpt_dir=tmp_path / "one/checkpoints"))


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("ckpt_dir", [None, "elsewhere/checkpoints", "runs/one", "runs/one/a/b"])
def test_a_refused_start_leaves_no_folder_that_it_made(tmp_path: Path, ckpt_dir: str | None):
    own = config(tmp_path / "runs", ckpt_dir=None if ckpt_dir is None else tmp_path / ckpt_dir)
    with pytest.raises(DataError), own_folders(own, is_main=True):
        raise DataError("data.path=/x: no such file.")
    assert contents(tmp_path) == set()


def test_a_refused_start_leaves_the_folders_that_were_there(tmp_path: Path):
    (tmp_path / "one").mkdir()
    enter(config(tmp_path))
    assert contents(tmp_path) == {"one", "one/.lock"}
    enter(config(tmp_path))
    assert contents(tmp_path) == {"one", "one/.lock"}


@pytest.mark.parametrize("used", ["run.json", "checkpoints/latest", "checkpoints/step_00000001/"])
def test_a_folder_with_something_in_it_stays_with_its_lock(tmp_path: Path, used: str):
    with own_folders(config(tmp_path), is_main=True):
        path = tmp_path / "one" / used
        path.mkdir() if used.endswith("/") else path.touch()
    assert (tmp_path / "one" / used).exists()
    assert (tmp_path / "one" / lock.NAME).exists()
    assert (path.parent / lock.NAME).exists()


def test_a_start_that_finds_the_checkpoints_in_use_leaves_no_folder_of_its_own(tmp_path: Path):
    first, second = (config(tmp_path, name=name, ckpt_dir=tmp_path / "shared") for name in ("one", "two"))
    with own_folders(first, is_main=True):
        before = contents(tmp_path)
        with pytest.raises(ConfigError, match="in use"):
            enter(second)
        assert contents(tmp_path) == before


def test_without_locks_the_folder_stays_for_another_may_have_it(tmp_path: Path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    enter(config(tmp_path))
    assert (tmp_path / "one" / lock.NAME).exists()


def test_runs_with_folders_of_their_own_do_not_meet(tmp_path: Path):
    with own_folders(config(tmp_path), is_main=True):
        enter(config(tmp_path, name="two"))


def test_the_checkpoints_may_be_in_the_runs_own_folder(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "one")
    for ckpt_dir in (tmp_path / "one", tmp_path / "link"):
        enter(config(tmp_path, ckpt_dir=ckpt_dir))


def test_ranks_that_do_not_write_take_nothing(tmp_path: Path):
    with own_folders(config(tmp_path), is_main=False):
        assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named_with_its_key(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^checkpoint\.ckpt_dir=.*/file/x: cannot write .* \(Not a directory\)"):
        enter(config(tmp_path, ckpt_dir=tmp_path / "file/x"))


def test_a_lock_that_cannot_be_opened_is_an_error_of_the_folder(tmp_path: Path):
    (tmp_path / "one" / lock.NAME).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^run\.dir=.*: cannot write .*/one \(Is a directory\)"):
        enter(config(tmp_path))


def test_a_file_system_without_locks_is_said_once_and_the_run_goes_on(tmp_path: Path, monkeypatch, caplog):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    enter(config(tmp_path))
    (told,) = caplog.messages
    assert told.startswith(f"{tmp_path}/one and {tmp_path}/one/checkpoints: the file system has no locks, ")
