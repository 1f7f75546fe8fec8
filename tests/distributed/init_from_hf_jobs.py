"""What the ranks of the initial-weights tests run: the entry point, and a count of what each rank reads."""

import threading
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor

from moe_framework.checkpoint.convert.hf_source import HfSource
from tests.distributed.train_jobs import start_only


class Started(NamedTuple):
    """A run before its first step.

    Attributes:
        step: Where it starts.
        parameters: The whole parameters.
        elements_read: Elements that this rank read from the source, by the source's names.
        text: What was printed.
    """

    step: int
    parameters: dict[str, Tensor]
    elements_read: dict[str, int]
    text: str


def start_counting(arguments: list[str]) -> Started:
    """Start a run, stop it before its first step, and count what was read."""
    read: dict[str, int] = {}
    lock = threading.Lock()
    real = HfSource.read

    def counted(source: HfSource, name: str, region: Any = None) -> Tensor:
        values = real(source, name, region)
        with lock:
            read[name] = read.get(name, 0) + values.numel()
        return values

    with mock.patch.object(HfSource, "read", counted):
        position, _, parameters, text = start_only(arguments)
    return Started(position.step, parameters, read, text)
