"""Our own checkpoints' names: those of the model with `model.` before them."""

from collections.abc import Mapping
from typing import Any

from moe_framework.checkpoint.convert.families import FAMILIES
from moe_framework.checkpoint.convert.keymap import KeyMap, Row, compile_rows


def dcp_keymap(sizes: Mapping[str, Any]) -> KeyMap:
    """The key map of a step.

    Args:
        sizes: As `TensorSource.config` returns it.

    Returns:
        The key map. The optimizer's tensors are not in it: they are converted only between steps.
    """
    rows = (Row(shape.name, f"model.{shape.name}", when=shape.when) for shape in FAMILIES[sizes["family"]])
    return compile_rows(rows, sizes, ignored={r"optimizer\..*": "optimizer state"})
