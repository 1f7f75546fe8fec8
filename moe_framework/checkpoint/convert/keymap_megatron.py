"""Megatron-Core's names of our tensors, by family and by the layouts that its versions and settings save.

The tables hold the names of a GPTModel with the Transformer Engine layers and grouped GEMM. What differs by layout
(layers and experts stacked or not, where a norm's weight is kept) is exchanged in them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_framework.checkpoint.convert.keymap import KeyMap, Row, compile_rows
from moe_framework.checkpoint.convert.transforms import ByExpert, ByLayer, FusedHeads, Half, PaddedVocab

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
GATE, UP = Half(0), Half(1)

_LAYER, _MOE_LAYER, _DENSE_LAYER = (f"decoder.layers.{{{kind}}}" for kind in ("layer", "moe_layer", "dense_layer"))
_ENDS = (
    Row("embed.weight", EMBEDDING, (PaddedVocab(),)),
    Row("norm.weight", FINAL_NORM),
    Row("lm_head.weight", HEAD, (PaddedVocab(),), when="not tie_embeddings"),
)
_FUSED = f"{_LAYER}.self_attention.linear_qkv.weight"
_ATTENTION = (
    Row("layers.{layer}.attention_norm.weight", f"{_LAYER}.self_attention.linear_qkv.layer_norm_weight"),
    Row("layers.{layer}.attention.q_proj.weight", _FUSED, (FusedHeads("query"),)),
    Row("layers.{layer}.attention.k_proj.weight", _FUSED, (FusedHeads("key"),)),
    Row("layers.{layer}.attention.v_proj.weight", _FUSED, (FusedHeads("value"),)),
    Row("layers.{layer}.attention.o_proj.weight", f"{_LAYER}.self_attention.linear_proj.weight"),
    Row("layers.{layer}.attention.q_norm.weight", f"{_LAYER}.self_attention.q_layernorm.weight", when="qk_norm"),
    Row("layers.{layer}.attention.k_norm.weight", f"{_LAYER}.self_attention.k_layernorm.weight", when="qk_norm"),
)
_LATENT_ATTENTION = (
    Row("layers.{layer}.attention_norm.weight", f"{_LAYER}.input_layernorm.weight"),
    *(
        Row(f"layers.{{layer}}.attention.{ours}.weight", f"{_LAYER}.self_attention.{theirs}", when=when)
        for ours, theirs, when in (
            ("q_proj", "linear_q_proj.weight", "not q_lora_rank"),
            ("q_a_proj", "linear_q_down_proj.weight", "q_lora_rank"),
            ("q_a_norm", "linear_q_up_proj.layer_norm_weight", "q_lora_rank"),
            ("q_b_proj", "linear_q_up_proj.weight", "q_lora_rank"),
            ("kv_a_proj", "linear_kv_down_proj.weight", None),
            ("kv_a_norm", "linear_kv_up_proj.layer_norm_weight", None),
            ("kv_b_proj", "linear_kv_up_proj.weight", None),
            ("o_proj", "linear_proj.weight", None),
        )
    ),
)
_ROUTER = (
    Row("layers.{moe_layer}.moe_norm.weight", f"{_MOE_LAYER}.pre_mlp_layernorm.weight"),
    Row("layers.{moe_layer}.moe.router.weight", f"{_MOE_LAYER}.mlp.router.weight"),
)
_GATE_UP, _DOWN = "layers.{moe_layer}.moe.experts.gate_up", "layers.{moe_layer}.moe.experts.down"
_EXPERTS_OF = f"{_MOE_LAYER}.mlp.experts"
_EXPERTS = {
    "stacked": (
        Row(_GATE_UP, f"{_EXPERTS_OF}.experts.linear_fc1.weight"),
        Row(_DOWN, f"{_EXPERTS_OF}.experts.linear_fc2.weight"),
    ),
    "single": (
        Row(_GATE_UP, f"{_EXPERTS_OF}.experts.{{expert}}.linear_fc1.weight_w", (ByExpert(), GATE)),
        Row(_GATE_UP, f"{_EXPERTS_OF}.experts.{{expert}}.linear_fc1.weight_v", (ByExpert(), UP)),
        Row(_DOWN, f"{_EXPERTS_OF}.experts.{{expert}}.linear_fc2.weight", (ByExpert(),)),
    ),
    "grouped": (
        Row(_GATE_UP, f"{_EXPERTS_OF}.linear_fc1.weight{{expert}}", (ByExpert(),)),
        Row(_DOWN, f"{_EXPERTS_OF}.linear_fc2.weight{{expert}}", (ByExpert(),)),
    ),
    "sequential": (
        Row(_GATE_UP, f"{_EXPERTS_OF}.local_experts.{{expert}}.linear_fc1.weight", (ByExpert(),)),
        Row(_DOWN, f"{_EXPERTS_OF}.local_experts.{{expert}}.linear_fc2.weight", (ByExpert(),)),
    ),
}
_DEEPSEEK_LAYERS = (
    Row("layers.{moe_layer}.moe.router.expert_bias", f"{_MOE_LAYER}.mlp.router.expert_bias"),
    Row("layers.{moe_layer}.moe.shared_experts.gate_up", f"{_MOE_LAYER}.mlp.shared_experts.linear_fc1.weight"),
    Row("layers.{moe_layer}.moe.shared_experts.down", f"{_MOE_LAYER}.mlp.shared_experts.linear_fc2.weight"),
    Row("layers.{dense_layer}.moe_norm.weight", f"{_DENSE_LAYER}.mlp.linear_fc1.layer_norm_weight"),
    Row("layers.{dense_layer}.mlp.gate_up", f"{_DENSE_LAYER}.mlp.linear_fc1.weight"),
    Row("layers.{dense_layer}.mlp.down", f"{_DENSE_LAYER}.mlp.linear_fc2.weight"),
)
MEGATRON: dict[str, tuple[Row, ...]] = {
    "mixtral": _ENDS + _ATTENTION + _ROUTER,
    "qwen3_moe": _ENDS + _ATTENTION + _ROUTER,
    "deepseek_v3": _ENDS + _LATENT_ATTENTION + _ROUTER + _DEEPSEEK_LAYERS,
}
# Where the layers without Transformer Engine keep the same weights.
_UNFUSED = {
    f"{_MOE_LAYER}.pre_mlp_layernorm.weight": f"{_MOE_LAYER}.mlp.linear_fc1.layer_norm_weight",
    f"{_LAYER}.self_attention.linear_qkv.layer_norm_weight": f"{_LAYER}.input_layernorm.weight",
}
_IGNORED = {
    r".*\._extra_state\d*": "scales of 8-bit formats, which are found anew",
    r"mtp\..*": "a layer for predicting several tokens, which our model lacks",
}


@dataclass(frozen=True)
class MegatronLayout:
    """How a checkpoint of Megatron-Core splits the model into tensors.

    Attributes:
        stacked_layers: One tensor holds a weight of all layers, with the layer as dim 0; else the name has its number.
        experts: `stacked` (one tensor for the experts of a layer), `single` (one for each expert's gate, up and down),
            `grouped` or `sequential` (one for each expert's gate and up and for its down, by the names of the modules).
        renamed: Names of `_UNFUSED` that are used in place of those that they stand beside.
    """

    stacked_layers: bool = True
    experts: str = "stacked"
    renamed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, names: Iterable[str]) -> "MegatronLayout":
        """The layout that a checkpoint's names tell."""
        patterns = {_pattern(name) for name in names}
        layers = [pattern for pattern in patterns if pattern.startswith("decoder.layers.")]
        stacked = any(not pattern.startswith("decoder.layers.#.") for pattern in layers)
        experts = "stacked"
        for kind, rows in _EXPERTS.items():
            if any(_pattern(row.theirs, stacked) in patterns for row in rows):
                experts = kind
        renamed = {
            fused
            for fused, unfused in _UNFUSED.items()
            if _pattern(fused, stacked) not in patterns and _pattern(unfused, stacked) in patterns
        }
        return cls(stacked, experts, frozenset(renamed))


def megatron_keymap(sizes: Mapping[str, Any], names: Iterable[str] | None = None) -> KeyMap:
    """The key map of a Megatron-Core checkpoint.

    Args:
        sizes: As `TensorSource.config` returns it.
        names: Names of the tensors that are there, which tell the layout; None for the layout that is written: what
            Megatron-Core saves by default.

    Returns:
        The key map.
    """
    # Megatron-Core stacks the layers if all have the same tensors.
    uniform = MegatronLayout(stacked_layers=not sizes.get("num_dense_layers"))
    layout = uniform if names is None else MegatronLayout.of(names)
    return compile_rows(
        megatron_rows(sizes["family"], layout),
        sizes,
        aliases={HEAD: EMBEDDING} if sizes["tie_embeddings"] else {},
        ignored=_IGNORED,
    )


def megatron_rows(family: str, layout: MegatronLayout) -> tuple[Row, ...]:
    """The table of a family in a layout."""
    rows = MEGATRON[family] + _EXPERTS[layout.experts]
    if layout.experts == "single":
        rows = tuple(half for row in rows for half in _by_half(row))
    rows = tuple(replace(row, theirs=_UNFUSED[row.theirs]) if row.theirs in layout.renamed else row for row in rows)
    return tuple(_by_layer(row) for row in rows) if layout.stacked_layers else rows


def _by_half(row: Row) -> tuple[Row, ...]:
    """Gate and up as tensors of their own, for a row where they are one."""
    if not row.theirs.endswith(".linear_fc1.weight"):
        return (row,)
    return (
        replace(row, theirs=f"{row.theirs}_w", transforms=(*row.transforms, GATE)),
        replace(row, theirs=f"{row.theirs}_v", transforms=(*row.transforms, UP)),
    )


def _by_layer(row: Row) -> Row:
    if "layer}" not in row.theirs:
        return row
    return replace(row, theirs=_stacked_name(row.theirs), transforms=(*row.transforms, ByLayer()))


def _stacked_name(theirs: str) -> str:
    for layer in (_LAYER, _MOE_LAYER, _DENSE_LAYER):
        theirs = theirs.replace(f"{layer}.", "decoder.layers.")
    return theirs


def _pattern(name: str, stacked: bool = False) -> str:
    """A name without the numbers of layers and experts."""
    name = _stacked_name(name) if stacked else name
    for placeholder in ("{layer}", "{moe_layer}", "{dense_layer}"):
        name = name.replace(placeholder, "#")
    words = ["#" if word.isdigit() else word for word in name.replace("{expert}", "0").split(".")]
    return ".".join([*words[:-1], words[-1].rstrip("0123456789")])
