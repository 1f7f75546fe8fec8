"""The log of progress marks."""

import threading
import time

from moe_framework.resilience.marks import TRAINING, Exchange, MarkLog, Place


def _places(log: MarkLog) -> list[Place]:
    return [mark.place for mark in log.marks()]


def test_marks_carry_step_micro_batch_layer_and_phase():
    log = MarkLog()
    log.enter(TRAINING, 7)
    for _ in range(2):
        log.begin_forward()
        log.forward(0, "dispatch")
        log.end_forward()
        log.forward(0, "dispatch")
        log.backward(0, "dispatch")
    log.enter("evaluation", 7)
    log.begin_forward()
    log.forward(1, "experts")
    each = [
        Place(7, TRAINING, 1, "forward", None, "embedding"),
        Place(7, TRAINING, 1, "forward", 0, "dispatch"),
        Place(7, TRAINING, 1, "forward", None, "loss"),
        Place(7, TRAINING, 1, "recomputation", 0, "dispatch"),
        Place(7, TRAINING, 1, "backward", 0, "dispatch"),
    ]
    assert _places(log) == [
        Place(0, "start", 0, "", None, "begins"),
        Place(7, TRAINING, 0, "", None, "begins"),
        *each,
        *(place._replace(micro_batch=2) for place in each),
        Place(7, "evaluation", 0, "", None, "begins"),
        Place(7, "evaluation", 1, "forward", None, "embedding"),
        Place(7, "evaluation", 1, "forward", 1, "experts"),
    ]
    assert str(_places(log)[2]) == "step 7, micro-batch 1, forward, embedding"
    assert str(_places(log)[-1]) == "step 7, evaluation, micro-batch 1, layer 1, forward, experts"


def test_only_the_last_marks_are_kept():
    log = MarkLog(capacity=3)
    for layer in range(5):
        log.forward(layer, "router")
    assert [place.layer for place in _places(log)] == [2, 3, 4]


def test_marks_carry_the_time():
    before = time.time_ns()
    log = MarkLog()
    log.forward(0, "router")
    times = [before, *(mark.time_ns for mark in log.marks()), time.time_ns()]
    assert times == sorted(times)


def test_each_mark_is_a_new_sign_of_progress_also_in_the_same_place():
    log = MarkLog()
    first = log.newest
    assert log.newest is first
    log.enter("start", 0)
    assert log.newest is not first


def test_the_threads_that_made_marks_are_known():
    log = MarkLog()
    other = threading.Thread(target=log.forward, args=(0, "router"))
    other.start()
    other.join()
    assert log.threads == {threading.get_ident(), other.ident}


def test_the_last_exchange_keeps_its_place():
    log = MarkLog()
    assert log.last_exchange() is None
    log.enter(TRAINING, 2)
    log.begin_forward()
    log.exchanged(3, [1, 2], [3, 4])
    log.forward(3, "experts")
    assert log.last_exchange() == Exchange(Place(2, TRAINING, 1, "forward", 3, "dispatch"), [1, 2], [3, 4])


def test_places_sort_in_the_order_in_which_a_rank_comes_to_them():
    log = MarkLog()
    for step in (1, 2):
        log.enter(TRAINING, step)
        for _ in range(2):
            log.begin_forward()
            for layer in (0, 1):
                for activity in ("block", "attention", "router", "dispatch", "experts", "combine", "end of block"):
                    log.forward(layer, activity)
            log.end_forward()
            for layer in (1, 0):
                log.backward(layer, "block")
                for activity in ("attention", "router", "dispatch", "experts", "combine"):
                    log.forward(layer, activity)
                for activity in ("combine", "experts", "dispatch"):
                    log.backward(layer, activity)
        log.enter("evaluation", step)
        log.begin_forward()
    keys = [place.order() for place in _places(log)[1:]]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
