"""The formats by name: how one is recognised, opened, mapped and written."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_framework.checkpoint.convert.base import CheckpointFile
from moe_framework.checkpoint.convert.dcp_source import DcpSource
from moe_framework.checkpoint.convert.hf_config import CONFIG_NAME
from moe_framework.checkpoint.convert.hf_pickle import HfPickleSource
from moe_framework.checkpoint.convert.hf_source import INDEX_NAME, SINGLE_NAME, HfSource
from moe_framework.checkpoint.convert.keymap import KeyMap
from moe_framework.checkpoint.convert.keymap_dcp import dcp_keymap
from moe_framework.checkpoint.convert.keymap_hf import hf_keymap
from moe_framework.checkpoint.convert.keymap_megatron import megatron_keymap
from moe_framework.checkpoint.convert.megatron_source import BACKEND_NAME, MegatronSource, find_checkpoint
from moe_framework.checkpoint.folder import complete_steps, is_complete, newest_step
from moe_framework.errors import CheckpointError

HF, DCP, MEGATRON = "hf", "dcp", "megatron"
FORMATS = (HF, DCP, MEGATRON)


def detect(path: Path) -> str:
    """Recognise the format of a checkpoint.

    Args:
        path: Its folder.

    Returns:
        `hf`, `dcp` or `megatron`.

    Raises:
        CheckpointError: It is none of these.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a folder. Give the folder of a checkpoint.")
    if is_complete(path) or complete_steps(path):
        return DCP
    if (find_checkpoint(path) / BACKEND_NAME).is_file():
        return MEGATRON
    if (path / CONFIG_NAME).is_file():
        return HF
    raise CheckpointError(
        f"{path}: not a checkpoint: it has neither manifest.json (dcp), nor Megatron's metadata.json, nor "
        f"{CONFIG_NAME} (hf). Give the folder of a complete checkpoint."
    )


def open_checkpoint(
    path: Path,
    kind: str | None = None,
    *,
    allow_pickle: bool = False,
    sizes: Mapping[str, Any] | None = None,
) -> tuple[CheckpointFile, str]:
    """Open a checkpoint for reading.

    Args:
        path: Its folder; for steps of ours, also the folder that holds them, whose newest is taken.
        kind: Its format; None to recognise it.
        allow_pickle: Read Hugging Face's .bin files where there are no others, as weights only.
        sizes: What is known of the model, in our keys, for a format that does not tell all of it (Megatron).

    Returns:
        The source, and its format.

    Raises:
        CheckpointError: It is missing, damaged, or unsafe to read.
    """
    kind = kind or detect(path)
    if kind == HF:
        has_safetensors = (path / SINGLE_NAME).is_file() or (path / INDEX_NAME).is_file()
        return (HfPickleSource(path) if allow_pickle and not has_safetensors else HfSource(path)), kind
    if kind == MEGATRON:
        return MegatronSource(path, sizes), kind
    step_dir = path if is_complete(path) else newest_step(path)
    return DcpSource(step_dir or path), kind


def keymap_of(kind: str, sizes: Mapping[str, Any], names: Iterable[str] | None = None) -> KeyMap:
    """The key map of a format for a model.

    Args:
        kind: The format.
        sizes: As `TensorSource.config` returns it.
        names: Names of the tensors that are there, where a format has several ways to name them; None for the way
            that is written.
    """
    makers = {HF: hf_keymap, MEGATRON: megatron_keymap, DCP: lambda sizes, _: dcp_keymap(sizes)}
    return makers[kind](sizes, names)
