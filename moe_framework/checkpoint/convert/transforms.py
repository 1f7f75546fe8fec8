"""The rearrangements that key maps are written with; each refines links, so each is its own inverse.

A row of a table starts as one link, the whole of our tensor ↔ the whole of theirs, and its transforms are applied
from left to right.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_framework.checkpoint.convert.link import Link

# (links so far, sizes of the model, number of the layer) → finer links
Transform = Callable[[list[Link], Mapping[str, Any], int], list[Link]]


@dataclass(frozen=True)
class ByExpert:
    """Our dim 0 counts the experts, of which they have one tensor each: `{expert}` in their name."""

    def __call__(self, links: list[Link], sizes: Mapping[str, Any], layer: int) -> list[Link]:
        """Split each link by expert."""
        return [_one_expert(link, expert) for link in links for expert in range(link.size[0])]


def _one_expert(link: Link, expert: int) -> Link:
    dim = link.dims.index(0)
    return replace(
        link,
        start=(link.start[0] + expert, *link.start[1:]),
        size=(1, *link.size[1:]),
        theirs=link.theirs.replace("{expert}", str(expert)),
        at=_without(link.at, dim),
        dims=_without(link.dims, dim),
        step=_without(link.step, dim),
        theirs_shape=_without(link.theirs_shape, dim),
    )


@dataclass(frozen=True)
class Half:
    """One half of our second last dim (gate and up, one after the other) is a tensor of theirs.

    Attributes:
        index: 0 for the first half (gate), 1 for the second (up).
    """

    index: int

    def __call__(self, links: list[Link], sizes: Mapping[str, Any], layer: int) -> list[Link]:
        """Keep one half of each link."""
        return [self._half(link) for link in links]

    def _half(self, link: Link) -> Link:
        dim = len(link.size) - 2
        half = link.size[dim] // 2
        theirs_dim = link.dims.index(dim)
        return replace(
            link,
            start=_with(link.start, dim, link.start[dim] + self.index * half),
            size=_with(link.size, dim, half),
            theirs_shape=_with(link.theirs_shape, theirs_dim, half),
        )


@dataclass(frozen=True)
class Interleave:
    """Gate and up rows alternate in theirs and follow each other in ours; the second last dim of ours."""

    def __call__(self, links: list[Link], sizes: Mapping[str, Any], layer: int) -> list[Link]:
        """Split each link into the two halves."""
        return [self._half(link, index) for link in links for index in (0, 1)]

    def _half(self, link: Link, index: int) -> Link:
        dim = len(link.size) - 2
        half = link.size[dim] // 2
        theirs_dim = link.dims.index(dim)
        return replace(
            link,
            start=_with(link.start, dim, link.start[dim] + index * half),
            size=_with(link.size, dim, half),
            at=_with(link.at, theirs_dim, link.at[theirs_dim] + index),
            step=_with(link.step, theirs_dim, 2),
        )


@dataclass(frozen=True)
class Transpose:
    """Their last two dims are exchanged."""

    def __call__(self, links: list[Link], sizes: Mapping[str, Any], layer: int) -> list[Link]:
        """Exchange the dims of each link."""
        return [
            replace(
                link,
                at=_exchanged(link.at),
                dims=_exchanged(link.dims),
                step=_exchanged(link.step),
                theirs_shape=_exchanged(link.theirs_shape),
            )
            for link in links
        ]


@dataclass(frozen=True)
class ByLayer:
    """Their tensor has the layers of the model stacked along a dim before ours.

    Attributes:
        count: Key of the sizes: how many layers are stacked.
        first: Key of the sizes: number of the first of them; None for 0.
    """

    count: str = "num_layers"
    first: str | None = None

    def __call__(self, links: list[Link], sizes: Mapping[str, Any], layer: int) -> list[Link]:
        """Give each link the layer's place."""
        index = layer - (sizes[self.first] if self.first else 0)
        return [
            replace(
                link,
                at=(index, *link.at),
                dims=(None, *link.dims),
                step=(1, *link.step),
                theirs_shape=(sizes[self.count], *link.theirs_shape),
            )
            for link in links
        ]


@dataclass(frozen=True)
class FusedHeads:
    """Query, key and value rows are one tensor of theirs: for each key-value head its queries, its key, its value.

    Attributes:
        part: `query`, `key` or `value`: which of them our tensor is.

    Source: Megatron-Core's `linear_qkv` for grouped-query attention, arXiv:2305.13245.
    """

    part: str

    def __call__(self, links: list[Link], sizes: Mapping[str, Any], layer: int) -> list[Link]:
        """Split each link by key-value head."""
        groups, width = sizes["num_kv_heads"], sizes["head_dim"]
        queries = sizes["num_heads"] // groups * width
        offset, rows = {"query": (0, queries), "key": (queries, width), "value": (queries + width, width)}[self.part]
        total = queries + 2 * width
        return [
            replace(
                link,
                start=_with(link.start, 0, link.start[0] + group * rows),
                size=_with(link.size, 0, rows),
                at=_with(link.at, dim, link.at[dim] + group * total + offset),
                theirs_shape=_with(link.theirs_shape, dim, groups * total),
            )
            for link in links
            for dim in (link.dims.index(0),)
            for group in range(groups)
        ]


@dataclass(frozen=True)
class PaddedVocab:
    """Their tensor has more rows than the vocabulary: ignored when read, zeros when written.

    Attributes:
        size: Key of the sizes: rows of theirs. Where the sizes lack it, theirs has no padding.
    """

    size: str = "padded_vocab_size"

    def __call__(self, links: list[Link], sizes: Mapping[str, Any], layer: int) -> list[Link]:
        """Give each link's other side its padded number of rows."""
        rows = sizes.get(self.size)
        if rows is None:
            return links
        return [replace(link, theirs_shape=_with(link.theirs_shape, link.dims.index(0), rows)) for link in links]


def _with[T](items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _without[T](items: tuple[T, ...], index: int) -> tuple[T, ...]:
    return items[:index] + items[index + 1 :]


def _exchanged[T](items: tuple[T, ...]) -> tuple[T, ...]:
    return (*items[:-2], items[-1], items[-2])
