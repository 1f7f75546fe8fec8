"""Transformer Engine's fused MXFP8 grouped MLP: the layout that it wants, and what keeps it from running.

On Blackwell one operation computes both products and the activation between them. It is used only where everything
fits, and otherwise Transformer Engine computes the parts one by one without a word. So the conditions are checked
here, each with a text of its own, and after the first call the operation that ran is looked at.

Source: Transformer Engine 2.20, `pytorch/ops/fused/grouped_mlp.py`.
"""

import functools
import importlib
import logging
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from moe_framework.distributed.runtime import request_te_fusion

logger = logging.getLogger(__name__)

INTERLEAVE = 32
# Transformer Engine checks that all rows together are a multiple of 128; its kernels tile each expert's rows by 256.
ROW_ALIGNMENT = 256
WIDTH_ALIGNMENT = 64
FUSED_OPERATION = "GroupedMLP_CuTeGEMMGLU"

_CAPABILITIES = ((10, 0), (10, 7))
_LEAST_TE, _LEAST_FRONTEND = (2, 20), (1, 23)
_KERNELS = tuple(f"grouped_gemm_{name}_wrapper_sm100" for name in ("glu", "dglu", "quant", "wgrad"))


@dataclass(frozen=True)
class Arrangement:
    """How weights and rows are laid out for the operations.

    Attributes:
        interleave: Gate and up rows alternate in blocks of this many; None for all gate rows first.
        row_alignment: Each expert's number of rows is padded to a multiple of this, or of what the format needs.
    """

    interleave: int | None = None
    row_alignment: int = 1


PLAIN = Arrangement()
FUSED = Arrangement(INTERLEAVE, ROW_ALIGNMENT)


@dataclass(frozen=True)
class FusionSetting:
    """What the fused operation depends on, besides the layer's widths.

    Attributes:
        capability: CUDA compute capability; None without a GPU.
        te_version: Of transformer-engine; None where it is not installed.
        frontend_version: Of nvidia-cudnn-frontend; None where it is not installed.
        kernels_problem: Why the frontend's kernels cannot be imported; None where they can.
        flag_problem: From `request_te_fusion`.
        deterministic: Whether torch refuses what is not bit-reproducible.
    """

    capability: tuple[int, int] | None
    te_version: str | None
    frontend_version: str | None
    kernels_problem: str | None
    flag_problem: str | None
    deterministic: bool = False


def interleave_gate_up(gate_up: Tensor, size: int = INTERLEAVE) -> Tensor:
    """Let gate and up rows alternate in blocks; differentiable, so that gradients come back in our own layout.

    Args:
        gate_up: [e, 2F, D]; gate rows first; F is a multiple of `size`.
        size: Rows in a block.

    Returns:
        [e, 2F, D]: `size` gate rows, the `size` up rows of the same channels, and so on; a copy.
    """
    return gate_up.unflatten(1, (2, -1, size)).transpose(1, 2).flatten(1, 3)


def deinterleave_gate_up(gate_up: Tensor, size: int = INTERLEAVE) -> Tensor:
    """Undo `interleave_gate_up`.

    Args:
        gate_up: [e, 2F, D]; in alternating blocks.
        size: Rows in a block.

    Returns:
        [e, 2F, D]; gate rows first; a copy.
    """
    return gate_up.unflatten(1, (-1, 2, size)).transpose(1, 2).flatten(1, 3)


def fusion_setting(capability: tuple[int, int] | None) -> FusionSetting:
    """Look at this process and what is installed.

    Args:
        capability: CUDA compute capability of the device; None without a GPU.

    Returns:
        What was found. Asks for the fusion, if Transformer Engine is not imported yet.
    """
    return FusionSetting(
        capability=capability,
        te_version=_version("transformer-engine"),
        frontend_version=_version("nvidia-cudnn-frontend"),
        kernels_problem=_kernels_problem(),
        flag_problem=request_te_fusion(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def fused_mxfp8_obstacles(*, hidden_size: int, intermediate_size: int, setting: FusionSetting) -> list[str]:
    """List every condition of the fused operation that is not met.

    Args:
        hidden_size: D.
        intermediate_size: F.
        setting: From `fusion_setting`.

    Returns:
        One text per condition; empty where the operation can run.
    """
    obstacles = [
        _capability_obstacle(setting.capability),
        _version_obstacle("transformer-engine", setting.te_version, _LEAST_TE),
        _version_obstacle("nvidia-cudnn-frontend", setting.frontend_version, _LEAST_FRONTEND),
        setting.kernels_problem and f"it needs the CuTe kernels of nvidia-cudnn-frontend: {setting.kernels_problem}",
        setting.flag_problem,
        *(
            f"model.{name}={size} is no multiple of {WIDTH_ALIGNMENT}"
            for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size))
            if size % WIDTH_ALIGNMENT
        ),
        "train.deterministic=true: it sums the routing weights' gradient in no fixed order"
        if setting.deterministic
        else None,
    ]
    return [obstacle for obstacle in obstacles if obstacle]


def is_fused(sequence: Any) -> bool:
    """Say whether a `transformer_engine.pytorch.ops.Sequential` ran the fused operation in its last forward pass."""
    groups = getattr(sequence, "_module_groups", None) or []
    operations = [operation for group in groups for operation, _ in getattr(group, "_forward_ops", [])]
    return FUSED_OPERATION in {type(operation).__name__ for operation in operations}


@functools.cache
def log_arrangement(obstacles: tuple[str, ...]) -> None:
    """Say, once in a process, how MXFP8 experts are computed and why."""
    if obstacles:
        logger.info("experts in mxfp8: the fused operation cannot be used: %s", "; ".join(obstacles))
    else:
        logger.info("experts in mxfp8: arranged for Transformer Engine's fused operation")


@functools.cache
def warn_unfused() -> None:
    """Say, once in a process, that Transformer Engine did not fuse although everything is arranged."""
    logger.warning(
        "experts in mxfp8: Transformer Engine did not use its fused operation although every known condition is met; "
        "the results are right, but slower. `python tools/doctor.py` shows the versions."
    )


def _capability_obstacle(capability: tuple[int, int] | None) -> str | None:
    least, most = _CAPABILITIES
    if capability is not None and least <= capability <= most:
        return None
    has = "there is no CUDA device" if capability is None else f"this one has {capability[0]}.{capability[1]}"
    return f"it needs a GPU of compute capability 10.0 to 10.7 (Blackwell); {has}"


def _version_obstacle(package: str, version: str | None, least: tuple[int, int]) -> str | None:
    if version is not None and tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= least:
        return None
    found = "it is not installed" if version is None else f"{version} is installed"
    return f"it needs {package} {least[0]}.{least[1]} or newer; {found}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _kernels_problem() -> str | None:
    try:
        frontend = importlib.import_module("cudnn")
        for kernel in _KERNELS:
            getattr(frontend, kernel)
    except Exception as error:  # compiled code and optional packages: anything may be raised
        return f"{type(error).__name__}: {str(error).partition('\n')[0]}"
    return None
