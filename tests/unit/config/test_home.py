"""A leading ~ in a path is the home folder, however the path was given."""

from pathlib import Path

import pytest

from moe_framework.config.home import PATH_KEYS, quote_home
from moe_framework.config.keys import schema_keys
from moe_framework.config.load import load_config
from moe_framework.config.schema import Config
from moe_framework.errors import ConfigError


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that loads YAML and overrides with /home/me as the home folder."""
    monkeypatch.setenv("HOME", "/home/me")

    def load_text(text: str, *overrides: str) -> Config:
        (tmp_path / "mine.yaml").write_text(text)
        return load_config("mine", overrides, tmp_path)

    return load_text


def value_of(config: Config, key: str) -> str | None:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def test_every_path_key_is_a_key():
    assert set(PATH_KEYS) <= set(schema_keys())


@pytest.mark.parametrize("key", PATH_KEYS)
@pytest.mark.parametrize("form", ["{}=~/a", "++{}=~/a", "{}='~/a'", '{}="~/a"'])
def test_home_is_expanded_on_the_command_line(load, key: str, form: str):
    assert value_of(load("{}", form.format(key)), key) == "/home/me/a"


@pytest.mark.parametrize("key", PATH_KEYS)
def test_home_is_expanded_in_yaml(load, key: str):
    section, _, name = key.partition(".")
    assert value_of(load(f"{section}: {{{name}: ~/a}}"), key) == "/home/me/a"


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("~", "/home/me"),
        ("~/a b/c=1", "/home/me/a b/c=1"),
        ("/a/~b", "/a/~b"),
        ("./~", "./~"),
        ("'/a ~/b'", "/a ~/b"),
        ("~/${run.name}", "/home/me/run"),
    ],
)
def test_only_the_beginning_of_a_path_is_home(load, given: str, path: str):
    assert load("run: {name: run}", f"run.dir={given}").run.dir == path


@pytest.mark.parametrize("form", ["data.path={}", "data.path='{}'", 'data.path="{}"'])
def test_each_path_of_a_blend_is_expanded(load, form: str):
    paths = "0.7 ~/a 3e-1  ~/b 1 /c/~d"
    assert load("{}", form.format(paths)).data.path == "0.7 /home/me/a 3e-1  /home/me/b 1 /c/~d"


def test_unknown_user_is_a_violation(load):
    for override, name in (("run.dir=~nobody-here/x", "~nobody-here/x"), ("data.path=1 /a 2 ~nobody-here", "~nobody")):
        with pytest.raises(ConfigError) as caught:
            load("{}", override)
        (violation,) = caught.value.violations
        assert violation.startswith(f"{override}: no user is known whose home folder {name}")
        assert f"write ./{name}" in violation


@pytest.mark.parametrize("override", ["~run.dir", "run.name=~/a", "run.dir=/a", "run.dir='~/a'", "run.dir=[~/a]"])
def test_nothing_else_is_quoted(override: str):
    assert quote_home(override) == override


def test_text_that_is_no_path_keeps_its_hint(load):
    with pytest.raises(ConfigError, match=r"If the value is text, quote it: 'run.name=\"~a\"'"):
        load("{}", "run.name=~a")
