"""An alarm for losses that stand out from those before."""

import math
from collections import deque

WINDOW = 100
# Too few losses have no standard deviation to speak of.
LEAST = 20


class LossSpikeAlarm:
    """Compares each loss with the mean and the standard deviation of the last 100.

    Args:
        sigmas: Standard deviations above the mean that count as a spike; 0 turns the alarm off.
    """

    def __init__(self, sigmas: float):
        self._sigmas = sigmas
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def height(self, loss: float) -> float | None:
        """Return how many standard deviations a loss is above those before, if that is a spike; then count it in.

        Args:
            loss: Nats per target; one that is not finite is no spike and is not counted.
        """
        if not math.isfinite(loss):
            return None
        height = self._height(loss)
        self._losses.append(loss)
        return height

    def _height(self, loss: float) -> float | None:
        if not self._sigmas or len(self._losses) < LEAST:
            return None
        mean = math.fsum(self._losses) / len(self._losses)
        variance = math.fsum((value - mean) ** 2 for value in self._losses) / (len(self._losses) - 1)
        if loss <= mean or not variance:
            return None
        height = (loss - mean) / math.sqrt(variance)
        return height if height > self._sigmas else None
