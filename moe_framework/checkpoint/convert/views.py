"""Sources seen under other names: theirs as ours, ours as theirs, and in another dtype."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_framework.checkpoint.convert.base import Region, TensorInfo, TensorSource
from moe_framework.checkpoint.convert.boxes import region_shape, whole
from moe_framework.checkpoint.convert.keymap import KeyMap
from moe_framework.errors import CheckpointError

# The bias that chooses experts decides between near-ties: it stays in the precision that it was trained in.
KEPT_IN_PRECISION = ("expert_bias",)


class OurView:
    """A checkpoint of another format under our names; a `TensorSource`.

    Args:
        source: The checkpoint; it has what the key map expects (see `check.check_tensors`).
        keymap: From our names to its own.
    """

    def __init__(self, source: TensorSource, keymap: KeyMap):
        self._source = source
        self._keymap = keymap
        known = source.tensors()
        self._infos = {
            name: TensorInfo(shape, known[keymap.by_ours[name][0].theirs].dtype) for name, shape in keymap.ours.items()
        }

    def tensors(self) -> dict[str, TensorInfo]:
        """Our tensors by our names."""
        return dict(self._infos)

    def config(self) -> dict[str, Any]:
        """The source's."""
        return self._source.config()

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """See `TensorSource.read`; only what the region needs is read from the source."""
        info = self._infos[name]
        region = whole(info.shape) if region is None else region
        links = [part for link in self._keymap.by_ours[name] if (part := link.within_ours(region)) is not None]
        if len(links) == 1:
            return links[0].as_ours(self._source.read(links[0].theirs, links[0].theirs_region)).contiguous()
        box = torch.empty(region_shape(region), dtype=info.dtype)
        for link in links:
            block = self._source.read(link.theirs, link.theirs_region)
            box[_relative(link.ours_region, region)] = link.as_ours(block)
        return box


class TheirView:
    """Our tensors under another format's names; a `TensorSource`.

    Args:
        ours: A source of our tensors under our names.
        keymap: From our names to theirs.

    Raises:
        CheckpointError: Tensors of ours that are one of theirs differ in dtype.
    """

    def __init__(self, ours: TensorSource, keymap: KeyMap):
        self._ours = ours
        self._keymap = keymap
        known = ours.tensors()
        self._infos = {}
        for name, shape in keymap.theirs.items():
            dtypes = {known[link.ours].dtype for link in keymap.by_theirs[name]}
            if len(dtypes) > 1:
                raise CheckpointError(
                    f"'{name}' would be made of tensors of dtypes {sorted(map(str, dtypes))}. Give one with --dtype."
                )
            self._infos[name] = TensorInfo(shape, dtypes.pop())

    def tensors(self) -> dict[str, TensorInfo]:
        """Their tensors by their names."""
        return dict(self._infos)

    def config(self) -> dict[str, Any]:
        """The sizes of our tensors' model."""
        return self._ours.config()

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """See `TensorSource.read`; padding is zero."""
        info = self._infos[name]
        region = whole(info.shape) if region is None else region
        links = [part for link in self._keymap.by_theirs[name] if (part := link.within_theirs(region)) is not None]
        if len(links) == 1 and links[0].covers(region):
            return links[0].as_theirs(self._ours.read(links[0].ours, links[0].ours_region))
        box = torch.zeros(region_shape(region), dtype=info.dtype)
        for link in links:
            values = self._ours.read(link.ours, link.ours_region)
            link.fill_theirs(box[_relative(link.theirs_region, region)], values)
        return box


class CastView:
    """Our tensors in another floating-point dtype; a `TensorSource`.

    Args:
        ours: A source of our tensors under our names.
        dtype: The dtype of all floating-point tensors but those of `KEPT_IN_PRECISION`.
    """

    def __init__(self, ours: TensorSource, dtype: torch.dtype):
        self._ours = ours
        self._infos = {
            name: TensorInfo(info.shape, dtype if _may_cast(name, info) else info.dtype)
            for name, info in ours.tensors().items()
        }

    def tensors(self) -> dict[str, TensorInfo]:
        """Our tensors with their new dtypes."""
        return dict(self._infos)

    def config(self) -> dict[str, Any]:
        """The source's."""
        return self._ours.config()

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """See `TensorSource.read`.

        Raises:
            CheckpointError: A finite number is too large for the dtype.
        """
        values = self._ours.read(name, region)
        cast = values.to(self._infos[name].dtype)
        if cast.dtype == torch.float16 and cast.dtype != values.dtype and not _same_finiteness(values, cast):
            raise CheckpointError(f"'{name}' has numbers that float16 cannot hold. Use --dtype bf16 or fp32.")
        return cast


class SelectedView:
    """Some tensors of a source, with new names; a `TensorSource`.

    Args:
        source: The source.
        names: New name → the source's.
    """

    def __init__(self, source: TensorSource, names: Mapping[str, str]):
        self._source = source
        self._names = dict(names)
        known = source.tensors()
        self._infos = {name: known[old] for name, old in self._names.items()}

    def tensors(self) -> dict[str, TensorInfo]:
        """The chosen tensors."""
        return dict(self._infos)

    def config(self) -> dict[str, Any]:
        """The source's."""
        return self._source.config()

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """See `TensorSource.read`."""
        return self._source.read(self._names[name], region)


def _relative(inner: Region, outer: Region) -> Region:
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(inner, outer, strict=True))


def _may_cast(name: str, info: TensorInfo) -> bool:
    # 8-bit floats carry scales beside them, so a cast alone would change what they mean.
    return info.dtype.is_floating_point and info.dtype.itemsize > 1 and not name.endswith(KEPT_IN_PRECISION)


def _same_finiteness(one: Tensor, two: Tensor) -> bool:
    return torch.equal(torch.isfinite(one), torch.isfinite(two))
