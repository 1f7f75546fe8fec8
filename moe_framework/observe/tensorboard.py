"""TensorBoard scalars."""

from collections.abc import Mapping
from pathlib import Path


class TensorBoardWriter:
    """Writes event files that `tensorboard --logdir` shows.

    Args:
        directory: Folder of the event files; created if it is missing.
        purge_step: First step that a resumed run repeats: TensorBoard hides what an earlier process wrote from
            there on. None for a new run.
    """

    def __init__(self, directory: Path | str, purge_step: int | None):
        # Here, because it costs most of a second and only rank 0 writes.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=purge_step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point of each curve and flush, so that a killed process loses none.

        Args:
            step: Optimizer steps done.
            values: Value by curve, such as `train/loss`.
        """
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left and close the files."""
        self._writer.close()
