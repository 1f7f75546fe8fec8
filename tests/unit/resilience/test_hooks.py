"""The marks of a model on one process; tests/distributed/test_hang_report.py has parallel ones."""

from typing import cast

import pytest
import torch

from moe_framework.model.block import Block
from moe_framework.model.decoder import Decoder
from moe_framework.moe.dispatch.local import LocalDispatcher
from moe_framework.resilience.hooks import is_compiled, watch_model
from moe_framework.resilience.marks import TRAINING, MarkLog
from tests.unit.model.builders import SMALL, plain_decoder

FORWARD = ["block", "attention", "router", "dispatch", "experts", "combine", "balancing", "end of block"]
BACKWARD = ["block", "combine", "experts", "dispatch"]


def _pass(model: Decoder) -> None:
    tokens = torch.arange(8)[None] % SMALL.vocab_size
    out = model(tokens, torch.arange(8)[None], tokens)
    (out.loss + out.aux_loss + out.z_loss).backward()


def _marks(log: MarkLog) -> list[tuple[str, int | None, str]]:
    return [(place.phase, place.layer, place.activity) for _, place in log.marks()]


def test_forward_and_backward_of_each_layer_are_marked_in_order():
    model, log = plain_decoder(), MarkLog()
    watch_model(model, log)
    log.enter(TRAINING, 1)
    _pass(model)
    assert _marks(log)[2:] == [
        ("forward", None, "embedding"),
        *(("forward", layer, activity) for layer in (0, 1) for activity in FORWARD),
        ("forward", None, "loss"),
        *(("backward", layer, activity) for layer in (1, 0) for activity in BACKWARD),
    ]


def test_evaluation_has_forward_marks_only():
    model, log = plain_decoder(), MarkLog()
    watch_model(model, log)
    with torch.no_grad():
        tokens = torch.arange(8)[None] % SMALL.vocab_size
        for _ in range(2):
            model(tokens, torch.arange(8)[None], tokens)
    assert {phase for phase, layer, _ in _marks(log) if layer is not None} == {"forward"}
    assert log.micro_batch == 2


def test_the_hooks_can_be_taken_away():
    model, log = plain_decoder(), MarkLog()
    undo = watch_model(model, log)
    undo()
    before = len(log.marks())
    _pass(model)
    assert len(log.marks()) == before
    assert all(isinstance(block.moe.dispatcher, LocalDispatcher) for block in model.layers)  # pyright: ignore


def test_a_module_that_is_compiled_gets_no_hook():
    model, log = plain_decoder(), MarkLog()
    attention, other = (cast(Block, block).attention for block in model.layers)
    assert not is_compiled(attention)
    attention.compile()  # compiles when it is called, which it is not here
    assert is_compiled(attention)
    watch_model(model, log)
    assert not attention._forward_pre_hooks
    assert other._forward_pre_hooks


def test_an_error_in_a_layer_leaves_the_mark_of_its_place():
    model, log = plain_decoder(), MarkLog()
    watch_model(model, log)
    log.enter(TRAINING, 1)
    model.layers[1].moe.experts.register_forward_pre_hook(lambda *_: 1 / 0)  # pyright: ignore
    with pytest.raises(ZeroDivisionError):
        _pass(model)
    assert _marks(log)[-1] == ("forward", 1, "experts")
