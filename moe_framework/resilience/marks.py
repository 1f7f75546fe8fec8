"""Progress marks: where a rank is in its step, kept for the last while, at the cost of a microsecond or so each."""

import time
from collections import deque
from threading import get_ident
from typing import Literal, NamedTuple

Phase = Literal["", "forward", "recomputation", "backward"]

TRAINING = "training"
# Two steps of a model of 32 layers, eight marks a layer in forward and five in backward, are 832.
CAPACITY = 4096

_ORDER_IN_LAYER = {
    name: index
    for index, name in enumerate(
        ("block", "attention", "router", "dispatch", "experts", "combine", "balancing", "end of block")
    )
}
_BACKWARD_ORDER_IN_LAYER = {name: index for index, name in enumerate(("block", "combine", "experts", "dispatch"))}
_PHASES = {"": 0, "forward": 1, "recomputation": 2, "backward": 2}
_LAST = 10**9


class Place(NamedTuple):
    """A place in the run, the same on every rank that comes there.

    Attributes:
        step: Optimizer step, from 1; 0 before the first.
        part: `training`, or what else the run does, such as `evaluation` or `save`.
        micro_batch: Forward passes begun in this part, from 1; 0 before the first.
        phase: Of the pass.
        layer: Block, from 0; None outside the blocks.
        activity: What begins here.
    """

    step: int
    part: str
    micro_batch: int
    phase: Phase
    layer: int | None
    activity: str

    def __str__(self) -> str:
        """Return it as a report shows it."""
        parts = [f"step {self.step}"]
        if self.part != TRAINING:
            parts.append(self.part)
        if self.micro_batch:
            parts.append(f"micro-batch {self.micro_batch}")
        if self.layer is not None:
            parts.append(f"layer {self.layer}")
        if self.phase:
            parts.append(self.phase)
        return f"{', '.join(parts)}, {self.activity}"

    def order(self) -> tuple[int, ...]:
        """Return a key that sorts the places of a run by when a rank comes there."""
        backward = self.phase in ("recomputation", "backward")
        if self.layer is None:
            layer = _LAST if self.activity == "loss" else -_LAST
        else:
            layer = -self.layer if backward else self.layer
        if self.phase == "backward":
            # What is recomputed of a layer runs inside its backward pass, after the block's gradient has arrived.
            activity = _BACKWARD_ORDER_IN_LAYER.get(self.activity, len(_BACKWARD_ORDER_IN_LAYER))
            activity += len(_ORDER_IN_LAYER) if activity else -1
        else:
            activity = _ORDER_IN_LAYER.get(self.activity, 0)
        after_training = self.part != TRAINING
        return (self.step, after_training, self.micro_batch, _PHASES[self.phase], layer, activity)


class Mark(NamedTuple):
    """A rank came to a place.

    Attributes:
        time_ns: `time.time_ns()`.
        place: Where.
    """

    time_ns: int
    place: Place


class Exchange(NamedTuple):
    """How many tokens a rank exchanged in one dispatch.

    Attributes:
        place: The dispatch.
        sent: Token copies to each rank of the expert-parallel group.
        received: Token copies from each.
    """

    place: Place
    sent: list[int]
    received: list[int]


class MarkLog:
    """A rank's last marks; written by the threads that train, read by another.

    Args:
        capacity: Marks that are kept.

    Attributes:
        step: Of the marks to come.
        part: Of the marks to come.
        micro_batch: Of the marks to come.
        in_backward: Whether a forward pass has ended since the last one began: what runs in a block then is a
            recomputation.
        threads: `threading.get_ident()` of the threads that made marks.
        exchange: The last dispatch that ended; None before the first, and where no tokens travel.
        begun_ns: `time.time_ns()` when the log was begun.
    """

    def __init__(self, capacity: int = CAPACITY):
        self.begun_ns = time.time_ns()
        self._ring: deque[tuple] = deque(maxlen=capacity)
        self.step = 0
        self.part = "start"
        self.micro_batch = 0
        self.in_backward = False
        self.threads: set[int] = set()
        self.exchange: tuple[tuple, list[int], list[int]] | None = None
        self.enter("start", 0)

    def enter(self, part: str, step: int) -> None:
        """Begin a part of a step."""
        self.step, self.part, self.micro_batch, self.in_backward = step, part, 0, False
        self._mark("", None, "begins")

    def begin_forward(self) -> None:
        """Begin a micro-batch's forward pass."""
        self.micro_batch += 1
        self.in_backward = False
        self._mark("forward", None, "embedding")

    def end_forward(self) -> None:
        """Mark that a forward pass has ended; in training, the loss and its gradients are next."""
        self.in_backward = True
        self._mark("forward", None, "loss")

    def forward(self, layer: int, activity: str) -> None:
        """Mark that an activity of a layer begins, in the forward pass or in its recomputation."""
        self._mark("recomputation" if self.in_backward else "forward", layer, activity)

    def backward(self, layer: int, activity: str) -> None:
        """Mark that the gradients of an activity of a layer begin."""
        self._mark("backward", layer, activity)

    def exchanged(self, layer: int, sent: list[int], received: list[int]) -> None:
        """Keep how many tokens a dispatch exchanged."""
        phase = "recomputation" if self.in_backward else "forward"
        self.exchange = (self.step, self.part, self.micro_batch, phase, layer, "dispatch"), sent, received

    def _mark(self, phase: Phase, layer: int | None, activity: str) -> None:
        # Plain tuples, because a NamedTuple takes three times as long to make.
        self._ring.append((time.time_ns(), self.step, self.part, self.micro_batch, phase, layer, activity))
        self.threads.add(get_ident())

    @property
    def newest(self) -> tuple:
        """The last mark, as an object that is another one after each mark."""
        return self._ring[-1]

    def marks(self) -> list[Mark]:
        """Return the marks, the oldest first."""
        return [Mark(time_ns, Place(*place)) for time_ns, *place in self._ring.copy()]

    def last_exchange(self) -> Exchange | None:
        """Return the last dispatch that ended."""
        if self.exchange is None:
            return None
        place, sent, received = self.exchange
        return Exchange(Place(*place), list(sent), list(received))
