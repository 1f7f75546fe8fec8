"""A model's sizes in Megatron-Core's terms: from its tensors and arguments to ours, and back."""

import re
from collections.abc import Mapping
from typing import Any

from moe_framework.checkpoint.convert.keymap_megatron import EMBEDDING, FINAL_NORM, HEAD
from moe_framework.errors import CheckpointError

_ROUTER = "mlp.router.weight"
_PROJ = "self_attention.linear_proj.weight"
_QKV = "self_attention.linear_qkv.weight"
_EXPERT_DOWN = re.compile(r"mlp\.experts\.(.+\.)?linear_fc2\.weight\d*")
# Our key → Megatron's names of it, in its arguments and in its TransformerConfig.
_ARGS = {
    "num_heads": ("num_attention_heads",),
    "top_k": ("moe_router_topk",),
    "max_positions": ("max_position_embeddings",),
    "rope_theta": ("rotary_base",),
    "norm_eps": ("norm_epsilon", "layernorm_epsilon"),
    "init_std": ("init_method_std",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_head_dim",),
    "qk_rope_head_dim": ("qk_pos_emb_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
_REQUIRED = ("num_heads", "top_k", "max_positions", "rope_theta", "norm_eps")
# What enters the computation of a model that is already initialised.
_MATTERS = tuple(key for key in _ARGS if key not in ("max_positions", "init_std"))
_REQUIRED_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# What our model computes, in Megatron's arguments.
_MEANING = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "apply_layernorm_1p": False,
    "use_rope_scaling": False,
    "moe_router_pre_softmax": False,
    "moe_apply_probs_on_input": False,
}


def our_sizes(
    shapes: Mapping[str, tuple[int, ...]], args: Mapping[str, Any], given: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Sizes of the model that a checkpoint holds.

    Args:
        shapes: Shape of each tensor, by Megatron's names.
        args: The arguments in the checkpoint; empty if it has none.
        given: Sizes that the caller knows, by our keys; they may not contradict the arguments.
        where: The checkpoint, for messages.

    Returns:
        See `TensorSource.config`; with `padded_vocab_size`, the rows of the embedding.

    Raises:
        CheckpointError: The tensors are not those of a MoE GPTModel, a size is not known, or the sizes disagree.
    """
    tails, num_layers, num_dense = _layer_shapes(shapes)
    missing = [name for name, dims in ((EMBEDDING, 2), (FINAL_NORM, 1)) if len(shapes.get(name, ())) != dims]
    missing += [f"decoder.layers.*.{tail}" for tail in (_ROUTER, _PROJ) if len(tails.get(tail, ())) != 2]
    if missing:
        raise CheckpointError(f"{where}: no MoE GPTModel of Megatron-Core: it has no {', '.join(map(repr, missing))}.")
    latent = "self_attention.linear_kv_down_proj.weight" in tails
    qk_norm = "self_attention.q_layernorm.weight" in tails
    _check_meaning(args, latent, where)
    rows = shapes[EMBEDDING][0]
    sizes: dict[str, Any] = {
        "family": "deepseek_v3" if latent else "qwen3_moe" if qk_norm else "mixtral",
        "num_layers": num_layers,
        "hidden_size": shapes[FINAL_NORM][0],
        "intermediate_size": next(
            (shape[-1] for tail, shape in tails.items() if shape and _EXPERT_DOWN.fullmatch(tail)), 0
        ),
        "num_experts": tails[_ROUTER][0],
        "vocab_size": given.get("vocab_size") or args.get("vocab_size") or rows,
        "padded_vocab_size": rows,
        "tie_embeddings": HEAD not in shapes,
        "qk_norm": qk_norm,
        **_from_args(args, given, _REQUIRED + (_REQUIRED_LATENT if latent else ()), where),
    }
    if latent:
        sizes |= {"num_dense_layers": num_dense, **_widths(tails)}
        sizes |= {"num_kv_heads": sizes["num_heads"], "head_dim": sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]}
    else:
        sizes |= _heads(tails, sizes["num_heads"], args, where)
    _check_given(sizes, given, where)
    return {**given, **sizes}


def megatron_args(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments for a model: what its `--use-checkpoint-args` reads and its loading compares.

    Args:
        sizes: As `TensorSource.config` returns it.
    """
    args = {theirs[0]: sizes[ours] for ours, theirs in _ARGS.items() if sizes.get(ours) is not None}
    return {
        **args,
        **_MEANING,
        "num_layers": sizes["num_layers"],
        "hidden_size": sizes["hidden_size"],
        "ffn_hidden_size": sizes.get("dense_intermediate_size", sizes["intermediate_size"]),
        "moe_ffn_hidden_size": sizes["intermediate_size"],
        "num_experts": sizes["num_experts"],
        "group_query_attention": sizes["num_kv_heads"] != sizes["num_heads"],
        "num_query_groups": sizes["num_kv_heads"],
        "kv_channels": sizes["head_dim"],
        "qk_layernorm": sizes["qk_norm"] or sizes["family"] == "deepseek_v3",
        "multi_latent_attention": sizes["family"] == "deepseek_v3",
        "moe_router_score_function": "sigmoid" if sizes["family"] == "deepseek_v3" else "softmax",
        "vocab_size": sizes["vocab_size"],
        "padded_vocab_size": sizes.get("padded_vocab_size", sizes["vocab_size"]),
        "make_vocab_size_divisible_by": 128,
        "untie_embeddings_and_output_weights": not sizes["tie_embeddings"],
        "add_position_embedding": False,
        "use_rotary_position_embeddings": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "moe_grouped_gemm": True,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "no_save_optim": True,
        "no_save_rng": True,
    }


def _layer_shapes(shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Shapes by name within a layer, the number of layers, and the number of those without a router."""
    tails: dict[str, tuple[int, ...]] = {}
    layers: set[int] = set()
    routed: set[int] = set()
    for name, shape in shapes.items():
        found = re.fullmatch(r"decoder\.layers\.(?:(\d+)\.)?(.+)", name)
        if found is None:
            continue
        number, tail = found.groups()
        numbers = range(shape[0] if shape else 0) if number is None else [int(number)]
        layers.update(numbers)
        if tail == _ROUTER:
            routed.update(numbers)
        tails.setdefault(tail, shape[1:] if number is None else shape)
    return tails, len(layers), len(layers - routed)


def _from_args(
    args: Mapping[str, Any], given: Mapping[str, Any], required: tuple[str, ...], where: str
) -> dict[str, Any]:
    known = {
        ours: next((args[name] for name in theirs if args.get(name) is not None), None)
        for ours, theirs in _ARGS.items()
    }
    differs = [
        f"{ours}={given[ours]} contradicts its arguments, which have {ours}={value}"
        for ours, value in known.items()
        if ours in _MATTERS and value is not None and given.get(ours, value) != value
    ]
    if differs:
        raise CheckpointError(f"{where}: {', and '.join(differs)}. Set them to the checkpoint's.")
    known |= {ours: value for ours, value in given.items() if ours in _ARGS}
    absent = [f"{ours} (Megatron's {_ARGS[ours][0]})" for ours in required if known[ours] is None]
    if absent:
        raise CheckpointError(
            f"{where}: its arguments do not tell {', '.join(absent)}, and no tensor does. "
            "Give them: with --like, the folder of the model's config.json."
        )
    wrong = [f"{ours}={value!r:.40}" for ours, value in known.items() if not isinstance(value, int | float | None)]
    if wrong:
        raise CheckpointError(f"{where}: {', '.join(wrong)} must be a number. Correct the arguments in the checkpoint.")
    return {ours: value for ours, value in known.items() if value is not None}


def _heads(tails: Mapping[str, tuple[int, ...]], num_heads: int, args: Mapping[str, Any], where: str) -> dict[str, int]:
    """Key-value heads and head width from the fused projection's rows, which the number of query heads divides."""
    queries, fused = tails[_PROJ][-1], (tails.get(_QKV) or (0,))[0]
    head_dim, rest = divmod(queries, num_heads)
    num_kv_heads, odd = divmod(fused - queries, 2 * head_dim) if head_dim else (0, 1)
    said = {"kv_channels": head_dim, "num_query_groups": num_kv_heads if args.get("group_query_attention") else None}
    wrong = [
        f"{name}={args[name]}" for name, size in said.items() if args.get(name) not in (None, size) and size is not None
    ]
    if rest or odd or num_kv_heads < 1 or num_heads % num_kv_heads or wrong:
        raise CheckpointError(
            f"{where}: {', '.join([f'num_heads={num_heads}', *wrong])} does not fit '{_QKV}' with {fused} rows "
            f"and '{_PROJ}' with {queries} columns. Give the right num_heads."
        )
    return {"head_dim": head_dim, "num_kv_heads": num_kv_heads}


def _widths(tails: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Widths that only some DeepSeek-type models have."""
    found = {
        "shared_intermediate_size": tails.get("mlp.shared_experts.linear_fc2.weight"),
        "dense_intermediate_size": tails.get("mlp.linear_fc2.weight"),
    }
    return {key: shape[-1] for key, shape in found.items() if shape}


def _check_meaning(args: Mapping[str, Any], latent: bool, where: str) -> None:
    meaning = {**_MEANING, "moe_router_score_function": "sigmoid" if latent else "softmax"}
    wrong = [f"{name}={args[name]!r:.40}" for name, value in meaning.items() if args.get(name) not in (None, value)]
    if wrong:
        raise CheckpointError(
            f"{where}: {', '.join(wrong)}: our model computes something else, so its logits would be wrong. "
            "Only models with SwiGLU, RMSNorm and plain rotary positions are converted."
        )


def _check_given(sizes: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    wrong = [key for key, value in given.items() if sizes.get(key, value) != value]
    if wrong:
        raise CheckpointError(
            f"{where}: {', '.join(f'{key}={given[key]}' for key in wrong)} contradicts its tensors, which have "
            f"{', '.join(f'{key}={sizes[key]}' for key in wrong)}. Leave that out."
        )
    if sizes["vocab_size"] > sizes["padded_vocab_size"]:
        raise CheckpointError(
            f"{where}: vocab_size={sizes['vocab_size']}, but the embedding has {sizes['padded_vocab_size']} rows."
        )
