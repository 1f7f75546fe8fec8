"""A link: a box of one of our tensors and the place of the same numbers in a tensor of another format.

Every transformation between formats (stacking, splitting, transposing, interleaving, fusing heads, cropping) moves
numbers without changing them. So a conversion is a list of links; read from left to right it exports, from right
to left it imports, and its inverse cannot disagree with it.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from moe_framework.checkpoint.convert.base import Region


@dataclass(frozen=True)
class Link:
    """Equal boxes of two tensors.

    Attributes:
        ours: Name of our tensor.
        start: Where the box begins in it.
        size: Size of the box, in our dims.
        theirs: Name of the other format's tensor.
        at: Where the box begins there.
        dims: For each of their dims, our dim that runs along it; None where the box has one fixed index.
        step: For each of their dims, the distance of the box's neighbours.
        theirs_shape: Shape of the whole of their tensor.
    """

    ours: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    theirs: str
    at: tuple[int, ...]
    dims: tuple[int | None, ...]
    step: tuple[int, ...]
    theirs_shape: tuple[int, ...]

    @property
    def ours_region(self) -> Region:
        """The box in our tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    @property
    def theirs_region(self) -> Region:
        """The smallest box without a step around the box in their tensor."""
        spans = (
            1 if dim is None else (self.size[dim] - 1) * step + 1
            for dim, step in zip(self.dims, self.step, strict=True)
        )
        return tuple(slice(at, at + span) for at, span in zip(self.at, spans, strict=True))

    def within_ours(self, region: Region) -> "Link | None":
        """The part of the link inside a box of our tensor, or None if it is outside."""
        bounds = [
            (max(start, part.start) - start, min(start + size, part.stop) - start)
            for start, size, part in zip(self.start, self.size, region, strict=True)
        ]
        return self._narrowed(bounds)

    def within_theirs(self, region: Region) -> "Link | None":
        """The part of the link inside a box of their tensor, or None if it is outside."""
        bounds = [(0, size) for size in self.size]
        for dim, at, step, part in zip(self.dims, self.at, self.step, region, strict=True):
            if dim is None:
                if not part.start <= at < part.stop:
                    return None
                continue
            # Round up: the first index at or after the edge.
            first, last = -((at - part.start) // step), -((at - part.stop) // step)
            bounds[dim] = (max(bounds[dim][0], first), min(bounds[dim][1], last))
        return self._narrowed(bounds)

    def _narrowed(self, bounds: list[tuple[int, int]]) -> "Link | None":
        if any(low >= high for low, high in bounds):
            return None
        at = tuple(
            at if dim is None else at + bounds[dim][0] * step
            for dim, at, step in zip(self.dims, self.at, self.step, strict=True)
        )
        return replace(
            self,
            start=tuple(start + low for start, (low, _) in zip(self.start, bounds, strict=True)),
            size=tuple(high - low for low, high in bounds),
            at=at,
        )

    def as_ours(self, block: Tensor) -> Tensor:
        """Arrange what `theirs_region` holds as our box; a view."""
        return self._strided(block).permute(self._order()).reshape(self.size)

    def fill_theirs(self, block: Tensor, values: Tensor) -> None:
        """Write our box's values where they belong inside their box.

        Args:
            block: What `theirs_region` covers; changed in place.
            values: Our box, `size` in shape.
        """
        target = self._strided(block).permute(self._order())
        target.copy_(values.reshape(target.shape))

    def covers(self, region: Region) -> bool:
        """Whether the box fills a box of their tensor without a gap."""
        dense = all(dim is None or step == 1 for dim, step in zip(self.dims, self.step, strict=True))
        return dense and self.theirs_region == region

    def as_theirs(self, values: Tensor) -> Tensor:
        """Arrange our box as `theirs_region`, contiguous; for a link that covers it."""
        shape = [part.stop - part.start for part in self.theirs_region]
        kept = [dim for dim in self.dims if dim is not None]
        fixed = [dim for dim in range(len(self.size)) if dim not in kept]
        return values.permute([*fixed, *kept]).reshape(shape).contiguous()

    def _strided(self, block: Tensor) -> Tensor:
        return block[
            tuple(0 if dim is None else slice(None, None, step) for dim, step in zip(self.dims, self.step, strict=True))
        ]

    def _order(self) -> list[int]:
        """Their dims, without fixed ones, in the order of ours."""
        kept = [dim for dim in self.dims if dim is not None]
        return sorted(range(len(kept)), key=kept.__getitem__)
