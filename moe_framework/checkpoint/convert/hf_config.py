"""Hugging Face's config.json and our sizes, in both directions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moe_framework.errors import CheckpointError

CONFIG_NAME = "config.json"

# Our key → their keys, the first of which is written; every one that is in a file is kept up to date.
_COMMON = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "top_k": ("num_experts_per_tok",),
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings",),
    "norm_eps": ("rms_norm_eps",),
    "tie_embeddings": ("tie_word_embeddings",),
}
_KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    "mixtral": _COMMON | {"intermediate_size": ("intermediate_size",), "num_experts": ("num_local_experts",)},
    "qwen3_moe": _COMMON
    | {"intermediate_size": ("moe_intermediate_size",), "num_experts": ("num_experts", "num_local_experts")},
    "deepseek_v3": _COMMON
    | {
        "intermediate_size": ("moe_intermediate_size",),
        "num_experts": ("n_routed_experts", "num_local_experts"),
        "dense_intermediate_size": ("intermediate_size",),
        "num_dense_layers": ("first_k_dense_replace",),
        "num_shared_experts": ("n_shared_experts",),
        "num_nextn_layers": ("num_nextn_predict_layers",),
        "q_lora_rank": ("q_lora_rank",),
        "kv_lora_rank": ("kv_lora_rank",),
        "qk_nope_head_dim": ("qk_nope_head_dim",),
        "qk_rope_head_dim": ("qk_rope_head_dim",),
        "v_head_dim": ("v_head_dim",),
    },
}
_OPTIONAL = {"head_dim", "tie_embeddings", "num_nextn_layers", "q_lora_rank"}
_ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
# What our model computes; another value would change the result in silence.
_REQUIRED: dict[str, dict[str, tuple[Any, ...]]] = {
    "mixtral": {"hidden_act": ("silu",), "sliding_window": (None,)},
    "qwen3_moe": {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "mlp_only_layers": ([], None),
        "decoder_sparse_step": (1,),
        "norm_topk_prob": (True,),
    },
    "deepseek_v3": {"hidden_act": ("silu",), "attention_bias": (False,)},
}
# Whose absence means something else than ours: transformers' default is not to normalise the weights.
_NEEDED = ("norm_topk_prob",)
# May differ between a model and the config.json that it came with: a vocabulary is cropped, a head untied.
_FREE = ("max_positions", "tie_embeddings", "vocab_size")
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def read_hf_config(path: Path) -> dict[str, Any]:
    """Read a config.json.

    Args:
        path: The file.

    Raises:
        CheckpointError: It is missing or no JSON table.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing. Give a folder that transformers can load.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a table of keys.")
    return config


def sizes_of_hf(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate a config.json into our sizes.

    Args:
        config: Its content.
        where: Its path, for messages.

    Returns:
        See `TensorSource.config`.

    Raises:
        CheckpointError: The model is of another family, lacks a size, or computes what ours does not.
    """
    family = config.get("model_type")
    if family not in _KEYS:
        raise CheckpointError(f"{where}: model_type={family!r} cannot be converted. Known are {', '.join(_KEYS)}.")
    problems = [
        f"{where}: {key}={config.get(key)!r} is not what the model computes ({key}={allowed[0]!r})."
        for key, allowed in _REQUIRED[family].items()
        if (key in config or key in _NEEDED) and config.get(key) not in allowed
    ]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    # Our decoder has no DeepSeek yet, so that the scaling of its rotation contradicts nothing.
    if kind != "default" and family != "deepseek_v3":
        problems.append(f"{where}: rope_type={kind!r} is not what the model computes (rope_type='default').")
    sizes: dict[str, Any] = {"family": family, "qk_norm": family == "qwen3_moe"}
    for ours, theirs in _KEYS[family].items():
        value = next((config[key] for key in theirs if config.get(key) is not None), None)
        if value is None and ours not in _OPTIONAL:
            problems.append(f"{where}: {theirs[0]} is missing.")
        elif not isinstance(value, int | float | None):
            problems.append(f"{where}: {theirs[0]}={value!r} is not a number.")
        sizes[ours] = value
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        problems.append(f"{where}: rope_theta is missing.")
    if problems:
        raise CheckpointError("\n".join(problems) + " Convert a model that ours can compute.")
    return _completed(sizes, float(theta))  # pyright: ignore[reportArgumentType]  # None is a problem above


def _completed(sizes: dict[str, Any], theta: float) -> dict[str, Any]:
    sizes["rope_theta"] = theta
    sizes["tie_embeddings"] = bool(sizes["tie_embeddings"])
    if sizes["head_dim"] is None:
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_heads"]
    if sizes.get("num_shared_experts"):
        sizes["shared_intermediate_size"] = sizes["num_shared_experts"] * sizes["intermediate_size"]
    return sizes


def hf_config_of(sizes: Mapping[str, Any], dtype: torch.dtype, template: Mapping[str, Any] | None) -> dict[str, Any]:
    """Make the config.json of a model.

    Args:
        sizes: See `TensorSource.config`.
        dtype: Dtype of the weights.
        template: The config.json that the model came with, or one like it: it has what we don't keep, such as
            token ids.

    Returns:
        The content; the template, if nothing in it changes.

    Raises:
        CheckpointError: The template is of a model of another shape, or none is given and one is needed.
    """
    family = sizes["family"]
    if template is not None:
        return _updated(template, sizes, dtype)
    if family not in ("mixtral", "qwen3_moe"):
        raise CheckpointError(
            f"{family} has settings that a checkpoint of ours lacks. Give its config.json with --like."
        )
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "dtype": _DTYPE_NAMES.get(dtype, "float32"),
        "hidden_act": "silu",
        "sliding_window": None,
        "initializer_range": sizes.get("init_std", 0.02),
        "bos_token_id": None,
        "eos_token_id": None,
        # Versions 4 and 5 look for it in different places.
        "rope_theta": sizes["rope_theta"],
        "rope_parameters": {"rope_theta": sizes["rope_theta"], "rope_type": "default"},
    }
    if family == "qwen3_moe":
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False}
    return config | {theirs[0]: sizes[ours] for ours, theirs in _KEYS[family].items()}


def _updated(template: Mapping[str, Any], sizes: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    expected = sizes_of_hf(template, CONFIG_NAME)
    different = [
        f"{key} is {sizes[key]!r}, in {CONFIG_NAME} {value!r}"
        for key, value in expected.items()
        if key in sizes and sizes[key] != value and key not in _FREE
    ]
    if different:
        raise CheckpointError(
            f"{CONFIG_NAME} is of another model: {'; '.join(different)}. Give that of this model with --like."
        )
    config = dict(template)
    for key in _FREE:
        name = _COMMON[key][0]
        if key in sizes and sizes[key] != expected[key]:
            config[name] = sizes[key]
    for key in ("dtype", "torch_dtype"):
        if key in config and dtype in _DTYPE_NAMES:
            config[key] = _DTYPE_NAMES[dtype]
    return config
