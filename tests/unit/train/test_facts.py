import subprocess
from pathlib import Path

import pytest

from moe_framework.train.facts import git_commit


def git(folder: Path, *arguments: str) -> str:
    own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *own, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package that is committed in a repository."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return folder


def test_a_clean_package_has_the_commit(package: Path):
    commit = git(package, "rev-parse", "HEAD").strip()
    assert len(commit) == 40
    (package.parent / "notes.txt").write_text("outside of the package")
    (package / "ignored").write_text("not part of it")
    assert git_commit(package) == commit


@pytest.mark.parametrize("name", ["__init__.py", "new.py"])
def test_a_change_in_the_package_makes_it_dirty(package: Path, name: str):
    (package / name).write_text("x = 1\n")
    assert git_commit(package) == git(package, "rev-parse", "HEAD").strip() + "-dirty"


def test_a_package_that_only_lies_inside_a_repository_has_no_commit(package: Path, tmp_path: Path):
    installed = tmp_path / "venv/site-packages/package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert git_commit(installed) is None


def test_no_repository_is_no_commit(tmp_path: Path):
    (tmp_path / "__init__.py").write_text("")
    assert git_commit(tmp_path) is None
