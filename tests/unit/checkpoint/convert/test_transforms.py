"""Each transform moves numbers as plain torch would, and back; only what a box needs is read."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_framework.checkpoint.convert.link import Link
from moe_framework.checkpoint.convert.transforms import (
    ByExpert,
    ByLayer,
    FusedHeads,
    Half,
    Interleave,
    PaddedVocab,
    Transform,
    Transpose,
)
from moe_framework.checkpoint.convert.views import OurView, TheirView
from tests.unit.checkpoint.convert.folders import MemorySource

SIZES = {"num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "head_dim": 5, "padded_vocab_size": 16, "first": 1}


def links_of(name: str, tensor: Tensor, theirs: str, transforms: tuple[Transform, ...], layer: int = 0) -> list[Link]:
    dims = tuple(range(tensor.dim()))
    zeros, ones = (0,) * tensor.dim(), (1,) * tensor.dim()
    links = [Link(name, zeros, tuple(tensor.shape), theirs, zeros, dims, ones, tuple(tensor.shape))]
    for transform in transforms:
        links = transform(links, SIZES, layer)
    return links


def keymap_of(ours: dict[str, Tensor], links: list[Link]):
    from moe_framework.checkpoint.convert.keymap import KeyMap

    by_ours = {name: [link for link in links if link.ours == name] for name in ours}
    theirs = {link.theirs: link.theirs_shape for link in links}
    by_theirs = {name: [link for link in links if link.theirs == name] for name in theirs}
    return KeyMap({name: tuple(tensor.shape) for name, tensor in ours.items()}, theirs, by_ours, by_theirs)


def exported(ours: dict[str, Tensor], links: list[Link]) -> dict[str, Tensor]:
    view = TheirView(MemorySource(ours, {}), keymap_of(ours, links))
    return {name: view.read(name) for name in view.tensors()}


GATE_UP = torch.arange(4 * 6 * 5.0).reshape(4, 6, 5)
LAYERS = [torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
WEIGHT = torch.arange(12 * 5.0).reshape(12, 5)
QUERY, KEY, VALUE = (torch.randn(rows, 7, generator=torch.Generator().manual_seed(rows)) for rows in (30, 10, 10))
VALUE = VALUE + 1


def fused_heads() -> Tensor:
    """What Megatron's documentation says: for each group its queries, its key, its value."""
    rows = []
    for group in range(2):
        rows += [QUERY[group * 15 : group * 15 + 15], KEY[group * 5 : group * 5 + 5], VALUE[group * 5 : group * 5 + 5]]
    return torch.cat(rows)


CASES = {
    "same": ({"a": WEIGHT}, links_of("a", WEIGHT, "b", ()), {"b": WEIGHT}),
    "by expert": (
        {"a": GATE_UP},
        links_of("a", GATE_UP, "x.{expert}", (ByExpert(),)),
        {f"x.{expert}": GATE_UP[expert] for expert in range(4)},
    ),
    "gate and up by expert": (
        {"a": GATE_UP},
        links_of("a", GATE_UP, "gate.{expert}", (ByExpert(), Half(0)))
        + links_of("a", GATE_UP, "up.{expert}", (ByExpert(), Half(1))),
        {f"gate.{expert}": GATE_UP[expert, :3] for expert in range(4)}
        | {f"up.{expert}": GATE_UP[expert, 3:] for expert in range(4)},
    ),
    "interleaved": (
        {"a": GATE_UP},
        links_of("a", GATE_UP, "b", (Interleave(),)),
        {"b": torch.stack([GATE_UP[:, :3], GATE_UP[:, 3:]], dim=2).reshape(4, 6, 5)},
    ),
    "transposed": ({"a": GATE_UP}, links_of("a", GATE_UP, "b", (Transpose(),)), {"b": GATE_UP.mT}),
    "transposed by expert": (
        {"a": GATE_UP},
        links_of("a", GATE_UP, "x.{expert}", (ByExpert(), Transpose())),
        {f"x.{expert}": GATE_UP[expert].T for expert in range(4)},
    ),
    "interleaved and transposed": (
        {"a": GATE_UP},
        links_of("a", GATE_UP, "b", (Interleave(), Transpose())),
        {"b": torch.stack([GATE_UP[:, :3], GATE_UP[:, 3:]], dim=2).reshape(4, 6, 5).mT},
    ),
    "by layer": (
        {f"a{layer}": LAYERS[layer] for layer in range(3)},
        [link for layer in range(3) for link in links_of(f"a{layer}", LAYERS[layer], "b", (ByLayer(),), layer)],
        {"b": torch.stack(LAYERS)},
    ),
    "by layer after the first": (
        {f"a{layer}": LAYERS[layer] for layer in (1, 2, 0)},
        [
            link
            for layer in range(3)
            for link in links_of(f"a{layer}", LAYERS[layer], "b", (ByLayer(first="first"),), layer + 1)
        ],
        {"b": torch.stack(LAYERS)},
    ),
    "fused heads": (
        {"q": QUERY, "k": KEY, "v": VALUE},
        links_of("q", QUERY, "qkv", (FusedHeads("query"),))
        + links_of("k", KEY, "qkv", (FusedHeads("key"),))
        + links_of("v", VALUE, "qkv", (FusedHeads("value"),)),
        {"qkv": fused_heads()},
    ),
    "padded": (
        {"a": WEIGHT},
        links_of("a", WEIGHT, "b", (PaddedVocab(),)),
        {"b": torch.cat([WEIGHT, torch.zeros(4, 5)])},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_export_equals_plain_torch(case: str):
    ours, links, theirs = CASES[case]
    found = exported(ours, links)
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_import_is_the_inverse(case: str):
    ours, links, theirs = CASES[case]
    view = OurView(MemorySource(theirs, {}), keymap_of(ours, links))
    for name, tensor in ours.items():
        assert torch.equal(view.read(name), tensor), name


def boxes(draw: Any, shape: torch.Size) -> tuple[slice, ...]:
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append(slice(start, draw(st.integers(start + 1, size))))
    return tuple(box)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_box_equals_the_same_box_of_the_whole(data: st.DataObject):
    ours, links, theirs = CASES[data.draw(st.sampled_from(sorted(CASES)))]
    keymap = keymap_of(ours, links)
    source = MemorySource(theirs, {})
    name = data.draw(st.sampled_from(sorted(ours)))
    region = boxes(data.draw, ours[name].shape)
    assert torch.equal(OurView(source, keymap).read(name, region), ours[name][region])
    name = data.draw(st.sampled_from(sorted(theirs)))
    region = boxes(data.draw, theirs[name].shape)
    assert torch.equal(TheirView(MemorySource(ours, {}), keymap).read(name, region), theirs[name][region])


@pytest.mark.parametrize("case", ["by expert", "gate and up by expert", "transposed", "by layer", "fused heads"])
def test_a_box_reads_only_its_own_elements(case: str):
    ours, links, theirs = CASES[case]
    source = MemorySource(theirs, {})
    name = next(iter(ours))
    region = tuple(slice(1, 2) for _ in ours[name].shape)
    OurView(source, keymap_of(ours, links)).read(name, region)
    assert source.elements_read == 1
