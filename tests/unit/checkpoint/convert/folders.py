"""Small models to convert: sizes, sources in memory, and folders that transformers saves."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_framework.checkpoint.convert.base import Region, TensorInfo
from moe_framework.checkpoint.convert.convert import convert, verify
from moe_framework.checkpoint.convert.families import our_shapes
from moe_framework.checkpoint.convert.plan import Request, make_plan

# No two sizes are the same, so that no two dims can be exchanged unseen.
SIZES: dict[str, Any] = {
    "family": "mixtral",
    "num_layers": 4,
    "hidden_size": 48,
    "intermediate_size": 20,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 10,
    "num_experts": 4,
    "top_k": 2,
    "vocab_size": 101,
    "max_positions": 64,
    "rope_theta": 1e6,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
    "qk_norm": False,
}
DEEPSEEK_SIZES = SIZES | {
    "family": "deepseek_v3",
    "num_dense_layers": 1,
    "num_shared_experts": 2,
    "shared_intermediate_size": 40,
    "dense_intermediate_size": 28,
    "q_lora_rank": 12,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 18,
    "num_heads": 2,
    "head_dim": 6,
}
FAMILY_SIZES = {
    "mixtral": SIZES,
    "qwen3_moe": SIZES | {"family": "qwen3_moe", "qk_norm": True},
    "deepseek_v3": DEEPSEEK_SIZES,
}


class MemorySource:
    """Tensors in memory as a source that counts what is read."""

    def __init__(self, tensors: dict[str, Tensor], sizes: dict[str, Any]):
        self.values = tensors
        self.sizes = sizes
        self.elements_read = 0

    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in self.values.items()}

    def read(self, name: str, region: Region | None = None) -> Tensor:
        value = self.values[name]
        part = (value if region is None else value[region]).clone(memory_format=torch.contiguous_format)
        self.elements_read += part.numel()
        return part

    def config(self) -> dict[str, Any]:
        return dict(self.sizes)


def our_tensors(sizes: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random values for every tensor of ours; no two elements of the model are likely the same."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in our_shapes(sizes).items()}


def their_config(sizes: dict[str, Any]) -> Any:
    from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

    kinds: dict[str, Any] = {"mixtral": MixtralConfig, "qwen3_moe": Qwen3MoeConfig, "deepseek_v3": DeepseekV3Config}
    common = {
        "vocab_size": sizes["vocab_size"],
        "hidden_size": sizes["hidden_size"],
        "num_hidden_layers": sizes["num_layers"],
        "num_attention_heads": sizes["num_heads"],
        "num_key_value_heads": sizes["num_kv_heads"],
        "max_position_embeddings": sizes["max_positions"],
        "num_experts_per_tok": sizes["top_k"],
        "rms_norm_eps": sizes["norm_eps"],
        "tie_word_embeddings": sizes["tie_embeddings"],
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes["rope_theta"]},
        "attn_implementation": "eager",
    }
    own = {
        "mixtral": {
            "intermediate_size": sizes["intermediate_size"],
            "num_local_experts": sizes["num_experts"],
            "head_dim": sizes["head_dim"],
        },
        "qwen3_moe": {
            "moe_intermediate_size": sizes["intermediate_size"],
            "num_experts": sizes["num_experts"],
            "head_dim": sizes["head_dim"],
            "norm_topk_prob": True,
        },
        "deepseek_v3": {
            "moe_intermediate_size": sizes["intermediate_size"],
            "n_routed_experts": sizes["num_experts"],
            "intermediate_size": sizes.get("dense_intermediate_size"),
            "first_k_dense_replace": sizes.get("num_dense_layers"),
            "n_shared_experts": sizes.get("num_shared_experts"),
            "n_group": 2,
            "topk_group": 1,
            "num_key_value_heads": sizes["num_heads"],
            "num_nextn_predict_layers": 0,
        }
        | {
            key: sizes.get(key)
            for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        },
    }
    return kinds[sizes["family"]](**(common | own[sizes["family"]]))


def their_model(sizes: dict[str, Any], seed: int = 0) -> Any:
    """A model of transformers with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(their_config(sizes)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms are ones otherwise, which could be exchanged unseen
                parameter.add_(torch.randn_like(parameter) / 10)
    return model


def save_hf(folder: Path, sizes: dict[str, Any] = SIZES, seed: int = 0, **options: Any) -> Any:
    """Save a model as transformers does, and return it."""
    model = their_model(sizes, seed)
    model.save_pretrained(folder, **options)
    return model


def save_fused(folder: Path, model: Any) -> None:
    """Save a model under the names that it has in memory."""
    from safetensors.torch import save_file

    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def run(source: Path, target: Path, to: str, *, check: bool = True, **options: Any) -> dict[str, str]:
    """Convert, verify, and return the checksums."""
    plan = make_plan(Request(source, target, to, **options))
    try:
        checksums = convert(plan, workers=2, on_bytes=lambda _: None)
        if check:
            verify(plan, target, workers=2, on_bytes=lambda _: None)
    finally:
        plan.source.close()
    return checksums


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
