"""Comparison of a checkpoint's tensors with what its key map expects, before anything is written."""

import re

import torch

from moe_framework.checkpoint.convert.base import TensorSource
from moe_framework.checkpoint.convert.boxes import parts
from moe_framework.checkpoint.convert.keymap import KeyMap
from moe_framework.errors import CheckpointError


def check_tensors(source: TensorSource, keymap: KeyMap, where: str) -> list[str]:
    """Compare names, shapes and dtypes with the key map, and read the tensors that must be equal.

    Args:
        source: The checkpoint.
        keymap: From our names to its own.
        where: The checkpoint, for the message.

    Returns:
        Names that are there and are not converted, each with the reason.

    Raises:
        CheckpointError: Tensors are missing, unexpected or wrongly shaped; the message has each one on a line.
    """
    found = source.tensors()
    problems, left_out = [], []
    for name in sorted(keymap.theirs.keys() | found.keys(), key=_natural):
        if name not in found:
            problems.append(f"'{name}' {list(keymap.theirs[name])} is missing.")
        elif name in keymap.theirs:
            if found[name].shape != keymap.theirs[name]:
                problems.append(
                    f"'{name}' is {list(found[name].shape)}, but the model's sizes need {list(keymap.theirs[name])}."
                )
        elif name not in keymap.aliases:
            reason = next((why for pattern, why in keymap.ignored.items() if re.fullmatch(pattern, name)), None)
            if reason is None:
                problems.append(f"'{name}' {list(found[name].shape)} is unexpected: the model has no such tensor.")
            else:
                left_out.append(f"{name}: {reason}")
    for name, links in keymap.by_ours.items():
        dtypes = {str(found[link.theirs].dtype) for link in links if link.theirs in found}
        if len(dtypes) > 1:
            problems.append(f"the parts of '{name}' have different dtypes: {', '.join(sorted(dtypes))}.")
    problems = problems or _alias_problems(source, keymap)
    if problems:
        lines = "\n".join(f"{where}: {problem}" for problem in problems)
        raise CheckpointError(f"{lines} Complete the checkpoint, or correct its configuration.")
    return left_out


def _alias_problems(source: TensorSource, keymap: KeyMap) -> list[str]:
    found = source.tensors()
    problems = []
    for alias, target in keymap.aliases.items():
        if alias not in found:
            continue
        same = found[alias] == found[target] and all(
            torch.equal(source.read(alias, region), source.read(target, region)) for region in parts(found[alias])
        )
        if not same:
            problems.append(
                f"'{alias}' differs from '{target}', though the configuration says that they are one tensor "
                "(tie_word_embeddings=true)."
            )
    return problems


def _natural(name: str) -> list[str]:
    """Sorts layer 10 after layer 9."""
    return [word.zfill(8) if word.isdigit() else word for word in re.split(r"(\d+)", name)]
