"""Hydra's command-line syntax, and the flags that are refused."""

import pytest

from moe_framework.config.command_line import CommandLine, help_text, parse_command_line
from moe_framework.config.keys import schema_keys
from moe_framework.errors import ConfigError


@pytest.mark.parametrize(
    "flags", [["--config-name", "L0"], ["--config-name=L0"], ["-cn", "L0"], ["-cn=L0"], ["-cn", "X", "-cn", "L0"]]
)
def test_spellings_of_config_name(flags: list[str]):
    assert parse_command_line([*flags, "a.b=c"]) == CommandLine("L0", None, ("a.b=c",), None)


@pytest.mark.parametrize("flags", [["--config-dir", "/d"], ["--config-dir=/d"], ["-cd", "/d"]])
def test_spellings_of_config_dir(flags: list[str]):
    assert parse_command_line(flags).config_dir == "/d"


def test_overrides_keep_their_order_around_flags():
    parsed = parse_command_line(["a=1", "--config-name", "L0", "+b=2", "~c", "a=-3"])
    assert parsed.overrides == ("a=1", "+b=2", "~c", "a=-3")


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--cfg=job"], ["-c", "job"]])
def test_cfg_job_shows_the_configuration(flags: list[str]):
    assert parse_command_line(flags).show == "cfg"


@pytest.mark.parametrize("flags", [["--help"], ["-h"], ["--help", "--nonsense"], ["--cfg", "job", "-h"]])
def test_help_wins_over_everything(flags: list[str]):
    assert parse_command_line(flags).show == "help"


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (["--multirun"], "--multirun: this flag of Hydra is not supported here"),
        (["-m"], "-m: this flag of Hydra is not supported here"),
        (["--config-path", "x"], "Use --config-dir DIR."),
        (["--cfg", "hydra"], "--cfg=hydra must be job"),
        (["--resolve"], "--cfg job is always resolved"),
        (["--config-nam", "x"], "--config-nam: unknown flag. Did you mean --config-name?"),
        (["--zzzzz"], "--zzzzz: unknown flag. Use --config-name"),
        (["--config-name"], "--config-name needs a value, as in --config-name L0_sanity."),
        (["--config-name", "--cfg", "job"], "--config-name needs a value"),
    ],
)
def test_flag_that_cannot_be_obeyed_is_refused(argv: list[str], fragment: str):
    with pytest.raises(ConfigError) as caught:
        parse_command_line(argv)
    assert fragment in str(caught.value)


def test_all_wrong_flags_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_command_line(["-m", "--nonsense", "--cfg", "all"])
    assert len(caught.value.violations) == 3


def test_help_lists_configurations_groups_and_every_key_with_its_default():
    text = help_text(["L0_sanity"], {"model": ["tiny"]})
    assert "Configurations: L0_sanity" in text
    assert "Group model=NAME: tiny" in text
    for path, key in schema_keys().items():
        assert f"  {path}=" in text
        assert key.meaning in text
    assert "  model.head_dim=null\n" in text
    assert "  train.compile=false\n" in text
