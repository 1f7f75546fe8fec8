"""TensorBoard scalars."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

# Between attempts on a disk that is full: each leaves an empty file.
RETRY_S = 60.0


class TensorBoardWriter:
    """Writes event files that `tensorboard --logdir` shows.

    Points that a full disk does not take are lost, and said once: training does not end for them. TensorBoard's writer
    does not recover from an error, so that a new one, with a new file, takes over.

    Args:
        directory: Folder of the event files; created if it is missing.
        purge_step: First step that a resumed run repeats: TensorBoard hides what an earlier process wrote from
            there on. None for a new run.
        clock: Returns seconds.
    """

    def __init__(self, directory: Path | str, purge_step: int | None, *, clock: Callable[[], float] = time.monotonic):
        self._directory = str(directory)
        self._writer: SummaryWriter | None = _open(self._directory, purge_step)
        self._clock = clock
        self._lost_at: float | None = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point of each curve and flush, so that a killed process loses none.

        Args:
            step: Optimizer steps done.
            values: Value by curve, such as `train/loss`.
        """
        if self._lost_at is not None and self._clock() < self._lost_at + RETRY_S:
            return
        try:
            self._writer = self._writer or _open(self._directory, None)
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
            self._lost_at = None
        except OSError as error:
            self.close()
            if self._lost_at is None:
                logger.warning("%s: cannot be written (%s); TensorBoard misses points", self._directory, error)
            self._lost_at = self._clock()

    def close(self) -> None:
        """Close the files; all points are written."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):  # what is left after an error
                writer.close()


def _open(directory: str, purge_step: int | None) -> "SummaryWriter":
    # Here, because it costs most of a second and only rank 0 writes.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(directory, purge_step=purge_step)
