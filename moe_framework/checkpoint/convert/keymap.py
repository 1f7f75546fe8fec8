"""Key maps: tables of our names and another format's, compiled for a model's sizes into links."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_framework.checkpoint.convert.families import expand, holds, our_shapes
from moe_framework.checkpoint.convert.link import Link
from moe_framework.checkpoint.convert.transforms import Transform


@dataclass(frozen=True)
class Row:
    """One tensor of ours, or a part of it, and one of theirs.

    Attributes:
        ours: Pattern of our name, with `{layer}`, `{moe_layer}` or `{dense_layer}` (see `families.py`).
        theirs: Pattern of their name, with the same placeholder, and `{expert}` where they have a tensor per expert.
            A tensor of theirs that several rows share is named by each.
        transforms: How the numbers are rearranged, from left to right; nothing for the same tensor.
        when: Key of the sizes that must be true for the row to apply; with `not ` before it, false.
    """

    ours: str
    theirs: str
    transforms: tuple[Transform, ...] = ()
    when: str | None = None


@dataclass(frozen=True)
class KeyMap:
    """The links between all of our tensors and all of theirs.

    Attributes:
        ours: Shape of each of our tensors.
        theirs: Shape of each of theirs.
        by_ours: Links that fill each of our tensors.
        by_theirs: Links that fill each of theirs.
        aliases: Names that theirs may have in excess → the tensor of theirs that they must equal, such as the output
            head of a model that uses its embedding.
        ignored: Patterns (`re.fullmatch`) of names of theirs that carry nothing to convert → why.
    """

    ours: dict[str, tuple[int, ...]]
    theirs: dict[str, tuple[int, ...]]
    by_ours: dict[str, list[Link]]
    by_theirs: dict[str, list[Link]]
    aliases: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)


def compile_rows(
    rows: Iterable[Row],
    sizes: Mapping[str, Any],
    *,
    aliases: Mapping[str, str] | None = None,
    ignored: Mapping[str, str] | None = None,
) -> KeyMap:
    """Write a table out for a model.

    Args:
        rows: The table.
        sizes: As `TensorSource.config` returns it.
        aliases: See `KeyMap`.
        ignored: See `KeyMap`.

    Returns:
        The key map; every element of every tensor of ours is linked exactly once.
    """
    ours = our_shapes(sizes)
    links = [link for row in rows if holds(row.when, sizes) for link in _links(row, sizes, ours)]
    by_ours: dict[str, list[Link]] = {name: [] for name in ours}
    by_theirs: dict[str, list[Link]] = {}
    for link in links:
        by_ours[link.ours].append(link)
        by_theirs.setdefault(link.theirs, []).append(link)
    for name, shape in ours.items():
        linked = sum(math.prod(link.size) for link in by_ours[name])
        assert linked == math.prod(shape), f"the table links {linked} of {math.prod(shape)} elements of {name}"
    theirs = {name: parts[0].theirs_shape for name, parts in by_theirs.items()}
    for link in links:
        assert link.theirs_shape == theirs[link.theirs], f"rows disagree about the shape of {link.theirs}"
    return KeyMap(ours, theirs, by_ours, by_theirs, dict(aliases or {}), dict(ignored or {}))


def _links(row: Row, sizes: Mapping[str, Any], ours: Mapping[str, tuple[int, ...]]) -> Iterable[Link]:
    for layer, name, theirs in expand(row.ours, row.theirs, sizes):
        shape = ours[name]
        links = [
            Link(
                ours=name,
                start=(0,) * len(shape),
                size=shape,
                theirs=theirs,
                at=(0,) * len(shape),
                dims=tuple(range(len(shape))),
                step=(1,) * len(shape),
                theirs_shape=shape,
            )
        ]
        for transform in row.transforms:
            links = transform(links, sizes, layer)
        yield from links
