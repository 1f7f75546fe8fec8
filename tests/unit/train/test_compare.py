import logging
from dataclasses import replace

import pytest
import torch.distributed as dist

from moe_framework.config.load import to_dict
from moe_framework.config.schema import Config
from moe_framework.optim.schedule import learning_rate
from moe_framework.train.compare import changes, check_same_on_all_ranks, digest, flat, log_changes
from tests.helpers.one_rank import one_rank


def changed(config: Config, section: str, **values: object) -> Config:
    return replace(config, **{section: replace(getattr(config, section), **values)})


BASE = changed(changed(Config(), "train", max_steps=10), "optim", warmup_steps=2, lr=1e-3, min_lr=1e-5)


def said(caplog: pytest.LogCaptureFixture, config: Config, steps_done: int) -> list[tuple[int, str]]:
    with caplog.at_level(logging.INFO):
        log_changes(changes(to_dict(BASE), config), config, steps_done)
    return [(record.levelno, record.message) for record in caplog.records]


def test_every_other_value_is_named_old_and_new():
    config = changed(changed(BASE, "optim", lr=2e-3), "moe", aux_loss="none")
    assert changes(to_dict(BASE), config) == {"optim.lr": [1e-3, 2e-3], "moe.aux_loss": ["sequence", "none"]}
    assert changes(to_dict(BASE), BASE) == {}


def test_a_key_younger_than_the_checkpoint_had_its_default():
    saved = to_dict(BASE)
    del saved["train"]["loss_spike_sigmas"], saved["eval"]
    assert changes(saved, BASE) == {}
    assert changes(saved, changed(BASE, "eval", every=5)) == {"eval.every": [0, 5]}


def test_a_longer_run_warns_of_both_learning_rates(caplog: pytest.LogCaptureFixture):
    longer = changed(BASE, "train", max_steps=20)
    shape = {"warmup_steps": 2, "max_steps": 20, "schedule": "cosine", "decay_steps": 0}
    rate = learning_rate(10, lr=1e-3, min_lr=1e-5, **shape)
    assert said(caplog, longer, 10) == [
        (logging.INFO, "changed since the checkpoint was saved: train.max_steps: 10 -> 20"),
        (
            logging.WARNING,
            f"THE LEARNING RATE JUMPS: step 11 has {rate:.4g}, and 1e-05 with the saved configuration "
            "(train.max_steps: 10 -> 20)",
        ),
    ]


def test_what_does_not_move_the_next_step_is_no_warning(caplog: pytest.LogCaptureFixture):
    # In the warm-up the end does not matter yet.
    config = changed(changed(BASE, "train", max_steps=20), "optim", weight_decay=0.0)
    assert [level for level, _ in said(caplog, config, 1)] == [logging.INFO, logging.INFO]


def test_a_longer_run_is_no_warning_before_the_decay_of_wsd(caplog: pytest.LogCaptureFixture):
    base = changed(BASE, "optim", schedule="wsd", decay_steps=3)
    longer = changed(base, "train", max_steps=20)
    with caplog.at_level(logging.INFO):
        log_changes(changes(to_dict(base), longer), longer, 6)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    with caplog.at_level(logging.INFO):
        log_changes(changes(to_dict(base), longer), longer, 7)
    assert "step 8 has 0.001, and 0.00067 with the saved configuration" in caplog.text


def test_another_schedule_warns_of_both_learning_rates(caplog: pytest.LogCaptureFixture):
    said_of = said(caplog, changed(BASE, "optim", schedule="constant"), 8)
    assert said_of[-1][0] == logging.WARNING
    assert "THE LEARNING RATE JUMPS: step 9 has 0.001, and " in said_of[-1][1]
    assert said_of[-1][1].endswith("(optim.schedule: cosine -> constant)")


def test_a_run_without_a_next_step_is_no_warning(caplog: pytest.LogCaptureFixture):
    config = changed(BASE, "optim", min_lr=1e-4)
    assert [level for level, _ in said(caplog, config, 10)] == [logging.INFO]


def test_ranks_of_one_configuration_pass(caplog: pytest.LogCaptureFixture):
    with one_rank() as runtime:
        check_same_on_all_ranks(BASE, runtime.checkpoint_group)
    assert not dist.is_initialized()


def test_the_digest_is_of_every_value():
    assert digest(BASE) == digest(replace(BASE))
    assert digest(BASE) != digest(changed(BASE, "optim", eps=1e-9))
    assert flat({"a": {"b": {"c": 1}}, "d": None}) == {"a.b.c": 1, "d": None}
