"""Finds processes by the variables that they were started with."""

import contextlib
from pathlib import Path


def processes_with(**environ: str) -> list[int]:
    """Return the ids of the processes whose environment has these variables, in order; of zombies it is gone.

    Args:
        **environ: Names and values.
    """
    wanted = {f"{name}={value}" for name, value in environ.items()}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted <= set((entry / "environ").read_text(errors="replace").split("\0")):
                    found.append(int(entry.name))
    return sorted(found)
