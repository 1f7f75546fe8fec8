"""Our tensors by model family: names and shapes, from the sizes of a model.

`{layer}` runs over all layers, `{moe_layer}` over those with experts, `{dense_layer}` over the first
`num_dense_layers`. A shape is a product of letters a dim:
V vocabulary, D width, F width of an expert, E experts, H query heads, K key-value heads, h head width,
S width of the shared experts together, G width of a dense layer, Q and R ranks of the compressed queries and of the
compressed keys and values, n, r and v widths of a head's plain key, rotated key and value.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_LETTERS = {
    "V": "vocab_size",
    "D": "hidden_size",
    "F": "intermediate_size",
    "E": "num_experts",
    "H": "num_heads",
    "K": "num_kv_heads",
    "h": "head_dim",
    "S": "shared_intermediate_size",
    "G": "dense_intermediate_size",
    "Q": "q_lora_rank",
    "R": "kv_lora_rank",
    "n": "qk_nope_head_dim",
    "r": "qk_rope_head_dim",
    "v": "v_head_dim",
}


@dataclass(frozen=True)
class Shape:
    """A tensor of ours.

    Attributes:
        name: Pattern of the name.
        dims: One word of letters and factors a dim, such as `E 2F D`; `+` adds.
        when: Key of the sizes that must be true for the tensor to exist; with `not ` before it, false.
    """

    name: str
    dims: str
    when: str | None = None


_ENDS = (
    Shape("embed.weight", "V D"),
    Shape("norm.weight", "D"),
    Shape("lm_head.weight", "V D", when="not tie_embeddings"),
    Shape("layers.{layer}.attention_norm.weight", "D"),
    Shape("layers.{layer}.moe_norm.weight", "D"),
)
_EXPERTS = (
    Shape("layers.{moe_layer}.moe.router.weight", "E D"),
    Shape("layers.{moe_layer}.moe.experts.gate_up", "E 2F D"),
    Shape("layers.{moe_layer}.moe.experts.down", "E D F"),
)
_ATTENTION = (
    Shape("layers.{layer}.attention.q_proj.weight", "Hh D"),
    Shape("layers.{layer}.attention.k_proj.weight", "Kh D"),
    Shape("layers.{layer}.attention.v_proj.weight", "Kh D"),
    Shape("layers.{layer}.attention.o_proj.weight", "D Hh"),
    Shape("layers.{layer}.attention.q_norm.weight", "h", when="qk_norm"),
    Shape("layers.{layer}.attention.k_norm.weight", "h", when="qk_norm"),
)
_LATENT_ATTENTION = (
    Shape("layers.{layer}.attention.q_proj.weight", "Hn+Hr D", when="not q_lora_rank"),
    Shape("layers.{layer}.attention.q_a_proj.weight", "Q D", when="q_lora_rank"),
    Shape("layers.{layer}.attention.q_a_norm.weight", "Q", when="q_lora_rank"),
    Shape("layers.{layer}.attention.q_b_proj.weight", "Hn+Hr Q", when="q_lora_rank"),
    Shape("layers.{layer}.attention.kv_a_proj.weight", "R+r D"),
    Shape("layers.{layer}.attention.kv_a_norm.weight", "R"),
    Shape("layers.{layer}.attention.kv_b_proj.weight", "Hn+Hv R"),
    Shape("layers.{layer}.attention.o_proj.weight", "D Hv"),
)
_DEEPSEEK_LAYERS = (
    Shape("layers.{moe_layer}.moe.router.expert_bias", "E"),
    Shape("layers.{moe_layer}.moe.shared_experts.gate_up", "2S D"),
    Shape("layers.{moe_layer}.moe.shared_experts.down", "D S"),
    Shape("layers.{dense_layer}.mlp.gate_up", "2G D"),
    Shape("layers.{dense_layer}.mlp.down", "D G"),
)

FAMILIES: dict[str, tuple[Shape, ...]] = {
    "mixtral": _ENDS + _ATTENTION + _EXPERTS,
    "qwen3_moe": _ENDS + _ATTENTION + _EXPERTS,
    "deepseek_v3": _ENDS + _LATENT_ATTENTION + _EXPERTS + _DEEPSEEK_LAYERS,
}


def our_shapes(sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the unsharded model, by our name.

    Args:
        sizes: As `TensorSource.config` returns it.

    Returns:
        Name → shape, layer after layer.
    """
    shapes = {}
    for shape in FAMILIES[sizes["family"]]:
        if holds(shape.when, sizes):
            dims = tuple(_dim(word, sizes) for word in shape.dims.split())
            shapes |= {name: dims for _, name, _ in expand(shape.name, "", sizes)}
    return dict(sorted(shapes.items(), key=lambda item: layer_order(item[0])))


def expand(ours: str, theirs: str, sizes: Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
    """Yield layer number and both names for every layer that a pair of patterns stands for; once without a layer."""
    num_layers, num_dense = sizes["num_layers"], sizes.get("num_dense_layers", 0)
    ranges = {
        "{layer}": range(num_layers),
        "{moe_layer}": range(num_dense, num_layers),
        "{dense_layer}": range(num_dense),
    }
    placeholder = next((placeholder for placeholder in ranges if placeholder in ours), None)
    if placeholder is None:
        yield 0, ours, theirs
        return
    for layer in ranges[placeholder]:
        yield layer, ours.replace(placeholder, str(layer)), theirs.replace(placeholder, str(layer))


def holds(when: str | None, sizes: Mapping[str, Any]) -> bool:
    """Whether a condition of a row is true for a model."""
    if when is None:
        return True
    return not sizes.get(when.removeprefix("not ")) if when.startswith("not ") else bool(sizes.get(when))


def layer_order(name: str) -> tuple[int, int]:
    """Sorts names: what comes before the layers, layer after layer, what comes after them."""
    found = re.search(r"layers\.(\d+)\.", name)
    if found is not None:
        return (1, int(found.group(1)))
    return (0, 0) if name.startswith("embed") else (2, 0)


def _dim(word: str, sizes: Mapping[str, Any]) -> int:
    return sum(_product(term, sizes) for term in word.split("+"))


def _product(term: str, sizes: Mapping[str, Any]) -> int:
    factors = re.findall(r"\d+|[A-Za-z]", term)
    return math.prod(int(factor) if factor.isdigit() else sizes[_LETTERS[factor]] for factor in factors)
