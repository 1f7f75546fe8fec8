"""The command line of tools/evaluate.py, and the configuration that it means."""

from pathlib import Path

import pytest

from moe_framework.config.schema import Config
from moe_framework.distributed.runtime import LaunchEnvironment
from moe_framework.errors import ConfigError
from tools.evaluate import main
from tools.evaluation.options import Options, parse, valid_config

LINE = ("--config-name", "L0_sanity", "runs/x")


def parsed(*words: str) -> Options:
    options = parse([*LINE, *words])
    assert options is not None
    return options


def config(*words: str, ranks: int = 1) -> Config:
    launch = LaunchEnvironment(world_size=ranks, local_world_size=ranks)
    return valid_config(parsed("parallel.ep=1", *words), launch)


def test_settings_may_stand_on_both_sides_of_options():
    options = parsed("data.path=/a.fa", "--split", "all", "parallel.ep=1", "--json", "x.json")
    assert (options.checkpoint, options.overrides) == ("runs/x", ("data.path=/a.fa", "parallel.ep=1"))
    assert (options.split, options.json) == ("all", Path("x.json"))


def test_a_setting_may_come_first_and_a_checkpoints_path_may_have_an_equals_sign():
    options = parse(["eval.max_rows=3", "-cn", "L0_sanity", "runs/lr=0.1/checkpoints"])
    assert options is not None
    assert (options.checkpoint, options.overrides) == ("runs/lr=0.1/checkpoints", ("eval.max_rows=3",))


def test_what_is_missing_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        parse(["eval.max_rows=3"])
    assert [line.split()[0] for line in caught.value.violations] == ["--config-name", "CHECKPOINT"]


@pytest.mark.parametrize("words", [("--split", "train"), ("--jsn", "x")])
def test_a_flag_that_cannot_be_parsed_is_an_error_without_a_traceback(words: tuple[str, ...], capsys):
    assert main([*LINE, *words]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: ")


def test_help_names_what_is_taken(capsys):
    assert main(["--help"]) == 0
    assert "--config-name NAME CHECKPOINT [KEY=VALUE ...]" in capsys.readouterr().out


def test_all_rows_are_used_unless_the_command_line_limits_them():
    assert config().eval.max_rows == 0
    assert config("eval.max_rows=5").eval.max_rows == 5


def test_what_only_training_needs_does_not_stand_in_the_way():
    found = config("train.global_batch_size=6", "checkpoint.resume=runs/other", "train.dry_run=true", ranks=4)
    assert found.parallel.dp == 4
    assert not found.train.dry_run
    assert (found.checkpoint.init_from, found.checkpoint.resume) == ("runs/x", "auto")


def test_home_is_expanded():
    options = parse(["-cn", "L0_sanity", "~/run", "parallel.ep=1"])
    assert options is not None
    assert valid_config(options, LaunchEnvironment()).checkpoint.init_from == str(Path.home() / "run")


def test_every_rule_that_is_broken_is_said():
    with pytest.raises(ConfigError) as caught:
        config("parallel.tp=3", "model.top_k=9", ranks=2)
    text = str(caught.value)
    assert "parallel.tp=3" in text
    assert "model.top_k=9" in text


def test_a_model_of_text_is_not_measured_on_the_demos_genome():
    with pytest.raises(ConfigError, match=r"^data\.path=null .* model\.vocab_size=100\. Set data\.path\.$"):
        config("model.vocab_size=100")
