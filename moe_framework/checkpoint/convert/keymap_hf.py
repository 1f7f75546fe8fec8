"""Hugging Face's names of our tensors, by family: on disk since version 4, and the fused ones of version 5."""

from collections.abc import Iterable, Mapping
from typing import Any

from moe_framework.checkpoint.convert.keymap import KeyMap, Row, compile_rows
from moe_framework.checkpoint.convert.transforms import ByExpert, Half, PaddedVocab

GATE, UP = Half(0), Half(1)

_ENDS = (
    Row("embed.weight", "model.embed_tokens.weight", (PaddedVocab(),)),
    Row("norm.weight", "model.norm.weight"),
    Row("lm_head.weight", "lm_head.weight", (PaddedVocab(),), when="not tie_embeddings"),
    Row("layers.{layer}.attention_norm.weight", "model.layers.{layer}.input_layernorm.weight"),
    Row("layers.{layer}.moe_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
)
_ATTENTION = (
    Row("layers.{layer}.attention.q_proj.weight", "model.layers.{layer}.self_attn.q_proj.weight"),
    Row("layers.{layer}.attention.k_proj.weight", "model.layers.{layer}.self_attn.k_proj.weight"),
    Row("layers.{layer}.attention.v_proj.weight", "model.layers.{layer}.self_attn.v_proj.weight"),
    Row("layers.{layer}.attention.o_proj.weight", "model.layers.{layer}.self_attn.o_proj.weight"),
    Row("layers.{layer}.attention.q_norm.weight", "model.layers.{layer}.self_attn.q_norm.weight", when="qk_norm"),
    Row("layers.{layer}.attention.k_norm.weight", "model.layers.{layer}.self_attn.k_norm.weight", when="qk_norm"),
)
_LATENT_ATTENTION = tuple(
    Row(f"layers.{{layer}}.attention.{ours}.weight", f"model.layers.{{layer}}.self_attn.{theirs}.weight", when=when)
    for ours, theirs, when in (
        ("q_proj", "q_proj", "not q_lora_rank"),
        ("q_a_proj", "q_a_proj", "q_lora_rank"),
        ("q_a_norm", "q_a_layernorm", "q_lora_rank"),
        ("q_b_proj", "q_b_proj", "q_lora_rank"),
        ("kv_a_proj", "kv_a_proj_with_mqa", None),
        ("kv_a_norm", "kv_a_layernorm", None),
        ("kv_b_proj", "kv_b_proj", None),
        ("o_proj", "o_proj", None),
    )
)
_GATE_UP, _DOWN = "layers.{moe_layer}.moe.experts.gate_up", "layers.{moe_layer}.moe.experts.down"
_MLP = "model.layers.{moe_layer}.mlp"
_MIXTRAL_MLP = "model.layers.{moe_layer}.block_sparse_moe"
_ROUTER = Row("layers.{moe_layer}.moe.router.weight", f"{_MLP}.gate.weight")
_MIXTRAL_EXPERTS = (
    Row("layers.{moe_layer}.moe.router.weight", f"{_MIXTRAL_MLP}.gate.weight"),
    Row(_GATE_UP, f"{_MIXTRAL_MLP}.experts.{{expert}}.w1.weight", (ByExpert(), GATE)),
    Row(_GATE_UP, f"{_MIXTRAL_MLP}.experts.{{expert}}.w3.weight", (ByExpert(), UP)),
    Row(_DOWN, f"{_MIXTRAL_MLP}.experts.{{expert}}.w2.weight", (ByExpert(),)),
)
_EXPERTS = (
    _ROUTER,
    Row(_GATE_UP, f"{_MLP}.experts.{{expert}}.gate_proj.weight", (ByExpert(), GATE)),
    Row(_GATE_UP, f"{_MLP}.experts.{{expert}}.up_proj.weight", (ByExpert(), UP)),
    Row(_DOWN, f"{_MLP}.experts.{{expert}}.down_proj.weight", (ByExpert(),)),
)
_FUSED_EXPERTS = (
    _ROUTER,
    Row(_GATE_UP, f"{_MLP}.experts.gate_up_proj"),
    Row(_DOWN, f"{_MLP}.experts.down_proj"),
)
_SHARED, _DENSE = "layers.{moe_layer}.moe.shared_experts", "layers.{dense_layer}.mlp"
_DEEPSEEK_LAYERS = (
    Row("layers.{moe_layer}.moe.router.expert_bias", f"{_MLP}.gate.e_score_correction_bias"),
    Row(f"{_SHARED}.gate_up", f"{_MLP}.shared_experts.gate_proj.weight", (GATE,)),
    Row(f"{_SHARED}.gate_up", f"{_MLP}.shared_experts.up_proj.weight", (UP,)),
    Row(f"{_SHARED}.down", f"{_MLP}.shared_experts.down_proj.weight"),
    Row(f"{_DENSE}.gate_up", "model.layers.{dense_layer}.mlp.gate_proj.weight", (GATE,)),
    Row(f"{_DENSE}.gate_up", "model.layers.{dense_layer}.mlp.up_proj.weight", (UP,)),
    Row(f"{_DENSE}.down", "model.layers.{dense_layer}.mlp.down_proj.weight"),
)

# Per expert, as every version writes them.
HF_V4: dict[str, tuple[Row, ...]] = {
    "mixtral": _ENDS + _ATTENTION + _MIXTRAL_EXPERTS,
    "qwen3_moe": _ENDS + _ATTENTION + _EXPERTS,
    "deepseek_v3": _ENDS + _LATENT_ATTENTION + _EXPERTS + _DEEPSEEK_LAYERS,
}
# Stacked, as version 5 keeps them in memory.
HF_V5: dict[str, tuple[Row, ...]] = {
    "mixtral": _ENDS + _ATTENTION + _FUSED_EXPERTS,
    "qwen3_moe": _ENDS + _ATTENTION + _FUSED_EXPERTS,
    "deepseek_v3": _ENDS + _LATENT_ATTENTION + _FUSED_EXPERTS + _DEEPSEEK_LAYERS,
}
_IGNORED = {r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq": "computed from rope_theta"}


def hf_keymap(sizes: Mapping[str, Any], names: Iterable[str] | None = None) -> KeyMap:
    """The key map of a Hugging Face checkpoint.

    Args:
        sizes: As `TensorSource.config` returns it.
        names: Names of the tensors that are there, which tell the fused layout from the other; None for
            per-expert names, which are those that are written.

    Returns:
        The key map.
    """
    fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in names or ())
    ignored = dict(_IGNORED)
    if sizes.get("num_nextn_layers"):
        first = sizes["num_layers"]
        layers = "|".join(str(first + layer) for layer in range(sizes["num_nextn_layers"]))
        ignored[rf"model\.layers\.({layers})\..*"] = "a layer for predicting several tokens, which our model lacks"
    return compile_rows(
        (HF_V5 if fused else HF_V4)[sizes["family"]],
        sizes,
        aliases={"lm_head.weight": "model.embed_tokens.weight"} if sizes["tie_embeddings"] else {},
        ignored=ignored,
    )
