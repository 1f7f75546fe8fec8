"""Plain values become the frozen dataclasses; wrong ones are all reported."""

from typing import Any

import pytest

from moe_framework.config.schema import Config
from moe_framework.config.structure import build_config


def build(values: dict[str, Any]) -> tuple[Config, list[str]]:
    violations: list[str] = []
    return build_config(values, violations), violations


def test_absent_keys_keep_their_defaults():
    assert build({}) == (Config(), [])


@pytest.mark.parametrize(
    ("section", "name", "given", "stored"),
    [
        ("optim", "lr", 1, 1.0),
        ("optim", "lr", "1e-4", 1e-4),
        ("optim", "lr", 0.5, 0.5),
        ("model", "head_dim", None, None),
        ("model", "head_dim", 64, 64),
        ("parallel", "dp", "auto", "auto"),
        ("parallel", "dp", 4, 4),
        ("train", "compile", True, True),
        ("moe", "aux_loss", "none", "none"),
        ("data", "path", None, None),
        ("data", "path", "/x.fa", "/x.fa"),
    ],
)
def test_value_of_the_right_type_is_stored(section: str, name: str, given: Any, stored: Any):
    config, violations = build({section: {name: given}})
    value = getattr(getattr(config, section), name)
    assert violations == []
    assert (value, type(value)) == (stored, type(stored))


@pytest.mark.parametrize(
    ("section", "name", "given", "message"),
    [
        ("optim", "lr", True, "optim.lr=true must be a finite number."),
        ("optim", "lr", "fast", "optim.lr=fast must be a finite number."),
        ("optim", "lr", float("nan"), "optim.lr=nan must be a finite number."),
        ("optim", "lr", "inf", "optim.lr=inf must be a finite number."),
        ("optim", "lr", 10**400, f"optim.lr={10**400} must be a finite number."),
        ("optim", "lr", None, "optim.lr=null must be a finite number."),
        ("train", "max_steps", True, "train.max_steps=true must be a whole number."),
        ("train", "max_steps", 1e3, "train.max_steps=1000.0 must be a whole number. Write 1000."),
        ("train", "max_steps", 1.5, "train.max_steps=1.5 must be a whole number."),
        ("train", "max_steps", "300", "train.max_steps=300 must be a whole number. Remove the quotes."),
        ("train", "max_steps", "02", "train.max_steps=02 must be a whole number. Write 2."),
        ("train", "max_steps", "-007", "train.max_steps=-007 must be a whole number. Write -7."),
        ("train", "max_steps", "00", "train.max_steps=00 must be a whole number. Write 0."),
        ("train", "max_steps", "-3", "train.max_steps=-3 must be a whole number. Remove the quotes."),
        ("train", "max_steps", "--3", "train.max_steps=--3 must be a whole number."),
        ("train", "compile", 1, "train.compile=1 must be true or false."),
        ("parallel", "dp", "foo", "parallel.dp=foo must be a whole number or auto."),
        ("parallel", "dp", True, "parallel.dp=true must be a whole number or auto."),
        ("model", "head_dim", "foo", "model.head_dim=foo must be a whole number or null."),
        ("run", "name", 7, "run.name=7 must be text. Put it in quotes."),
        ("run", "name", None, "run.name=null must be text."),
        ("data", "path", ["a"], "data.path=['a'] must be text or null."),
        ("moe", "aux_loss", "foo", "moe.aux_loss=foo must be one of sequence, global_batch, none."),
        ("moe", "aux_loss", False, "moe.aux_loss=false must be one of sequence, global_batch, none."),
        ("optim", "lr", "???", "optim.lr=??? must be set. Give it on the command line: optim.lr=VALUE."),
        ("optim", "lr", {"peak": 1}, "optim.lr={'peak': 1} must be a finite number."),
    ],
)
def test_value_of_the_wrong_type_is_refused(section: str, name: str, given: Any, message: str):
    config, violations = build({section: {name: given}})
    assert violations == [message]
    assert config == Config()


@pytest.mark.parametrize("given", [None, 3, [1], "x"])
def test_section_that_is_no_mapping_is_refused(given: Any):
    _, violations = build({"optim": given})
    assert len(violations) == 1
    assert "must be a section with keys" in violations[0]
    assert "optim.lr" in violations[0]


def test_each_leaf_of_an_unknown_section_is_reported():
    _, violations = build({"optm": {"lr": 1, "eps": 2}})
    assert violations == [
        "optm.lr=1: unknown key. Did you mean optim.lr?",
        "optm.eps=2: unknown key. Did you mean optim.eps?",
    ]


def test_all_violations_are_collected():
    _, violations = build({"optim": {"lr": "x", "foo": 1}, "device": "tpu", "model": 3})
    assert len(violations) == 4
