"""A rank of the training command that suffers the faults of a plan.

python tools/soaking/rank.py PLAN SUFFERED_FOLDER --config-name ... key=value
"""

import errno
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock


class Faults:
    """The faults of this rank that have not happened yet.

    Args:
        plan: From `read_plan`.
        folder: Gets a file for each fault that happened, so that it does not happen again after a restart.
        rank: This rank.
        checkpoints: The checkpoint folder.
    """

    def __init__(self, plan: list, folder: Path, rank: int, checkpoints: Path):
        self._left = [fault for fault in plan if fault.rank == rank and not _file(folder, fault).exists()]
        self._folder = folder
        self._checkpoints = checkpoints
        self._raising: Any = None
        self._failing: Any = None

    def begin_step(self, step: int) -> None:
        """Start the faults that are due in a step."""
        from tools.soaking.faults import EXCEPTION, FAILED_SAVE

        for fault in [one for one in self._left if one.step <= step]:
            self._left.remove(fault)
            if fault.kind == EXCEPTION:
                self._raising = fault
            elif fault.kind == FAILED_SAVE:
                self._failing = fault
            else:
                threading.Timer(fault.delay_s, self._signal, (fault,)).start()

    def enter_layer(self, layer: int) -> None:
        """Raise, if this layer is to.

        Raises:
            RuntimeError: It is.
        """
        fault = self._raising
        if fault is not None and fault.layer == layer:
            self._happens(fault)
            raise RuntimeError(f"planned fault {fault.number} in layer {layer}")

    def write(self) -> None:
        """Fail, if this save is to.

        Raises:
            OSError: It is.
        """
        fault, self._failing = self._failing, None
        if fault is not None:
            self._happens(fault)
            raise OSError(errno.ENOSPC, f"planned fault {fault.number}: no space left on device")

    def _signal(self, fault: Any) -> None:
        self._happens(fault)
        os.kill(os.getpid(), signal.Signals[fault.kind])

    def _happens(self, fault: Any) -> None:
        from moe_framework.checkpoint.folder import complete_steps, step_number
        from moe_framework.observe.metrics import write_json_atomic
        from tools.soaking.faults import Suffered

        newest = max((step_number(step) or 0 for step in complete_steps(self._checkpoints)), default=0)
        write_json_atomic(_file(self._folder, fault), asdict(Suffered(fault.number, time.time(), newest)))


def _file(folder: Path, fault: Any) -> Path:
    return folder / f"{fault.number:04}.json"


def main(argv: list[str]) -> int:
    """Run the training command with the faults in its way."""
    import train_fsdp2_ep
    from moe_framework.checkpoint import save
    from moe_framework.distributed.runtime import launch_environment
    from moe_framework.moe.layer import MoELayer
    from moe_framework.resilience.lifeline import Lifeline
    from tools.soaking.faults import read_plan

    plan_path, folder, checkpoints, *arguments = argv
    faults = Faults(read_plan(Path(plan_path)), Path(folder), launch_environment().rank, Path(checkpoints))
    real_begin, real_forward, real_write = Lifeline.begin_step, MoELayer.forward, save._Writer.write_data
    layers: dict[int, int] = {}

    def begin_step(lifeline: Any, step: int) -> None:
        faults.begin_step(step)
        real_begin(lifeline, step)

    def forward(layer: Any, *args: Any) -> Any:
        faults.enter_layer(layers.setdefault(id(layer), len(layers)))
        return real_forward(layer, *args)

    def write_data(writer: Any, *args: Any) -> Any:
        faults.write()
        return real_write(writer, *args)

    with (
        mock.patch.object(Lifeline, "begin_step", begin_step),
        mock.patch.object(MoELayer, "forward", forward),
        mock.patch.object(save._Writer, "write_data", write_data),
    ):
        return train_fsdp2_ep.main(arguments)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main(sys.argv[1:]))
