"""Tiny checkpoints in Megatron-Core's format, made by torch's own writer and plain code, for the tests of reading."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from moe_framework.checkpoint.convert.base import Region, TensorInfo
from moe_framework.checkpoint.convert.families import our_shapes

MIXTRAL: dict[str, Any] = {
    "family": "mixtral",
    "num_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "num_experts": 3,
    "top_k": 2,
    "vocab_size": 10,
    "padded_vocab_size": 10,
    "max_positions": 32,
    "rope_theta": 1e6,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
    "qk_norm": False,
}
DEEPSEEK = MIXTRAL | {
    "family": "deepseek_v3",
    "num_kv_heads": 4,
    "head_dim": 6,
    "num_dense_layers": 1,
    "shared_intermediate_size": 6,
    "dense_intermediate_size": 10,
    "q_lora_rank": 5,
    "kv_lora_rank": 3,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
ARGS: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 4,
    "moe_router_topk": 2,
    "max_position_embeddings": 32,
    "rotary_base": 1e6,
    "norm_epsilon": 1e-5,
    "swiglu": True,
    "params_dtype": torch.bfloat16,
}


class InMemory:
    """Tensors as a source."""

    def __init__(self, tensors: dict[str, Tensor], sizes: dict | None = None):
        self._tensors = tensors
        self._sizes = sizes or {}

    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def read(self, name: str, region: Region | None = None) -> Tensor:
        return self._tensors[name][region or ...].clone()

    def config(self) -> dict:
        return self._sizes


def our_tensors(sizes: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of a model under our names."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in our_shapes(sizes).items()}


def megatron_layers(ours: dict[str, Tensor], sizes: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The tensors of each layer of a Mixtral-type model as a GPTModel holds them, experts stacked."""
    groups, width = sizes["num_kv_heads"], sizes["head_dim"]
    layers = []
    for number in range(sizes["num_layers"]):
        prefix = f"layers.{number}"
        query, key, value = (ours[f"{prefix}.attention.{part}_proj.weight"] for part in "qkv")
        by_group = zip(query.chunk(groups), key.split(width), value.split(width), strict=True)
        layers.append(
            {
                "self_attention.linear_qkv.weight": torch.cat([torch.cat(rows) for rows in by_group]),
                "self_attention.linear_qkv.layer_norm_weight": ours[f"{prefix}.attention_norm.weight"],
                "self_attention.linear_proj.weight": ours[f"{prefix}.attention.o_proj.weight"],
                "pre_mlp_layernorm.weight": ours[f"{prefix}.moe_norm.weight"],
                "mlp.router.weight": ours[f"{prefix}.moe.router.weight"],
                "mlp.experts.experts.linear_fc1.weight": ours[f"{prefix}.moe.experts.gate_up"],
                "mlp.experts.experts.linear_fc2.weight": ours[f"{prefix}.moe.experts.down"],
            }
        )
    return layers


def megatron_tensors(ours: dict[str, Tensor], sizes: dict[str, Any], layout: str = "stacked") -> dict[str, Tensor]:
    """A Mixtral-type model under Megatron's names.

    Args:
        ours: The tensors under our names.
        sizes: The model's sizes.
        layout: `stacked` by layer and expert; `by_layer`; `single`, `grouped` or `sequential`, by layer and expert.
    """
    layers = megatron_layers(ours, sizes)
    ends = {
        "embedding.word_embeddings.weight": ours["embed.weight"],
        "decoder.final_layernorm.weight": ours["norm.weight"],
        "output_layer.weight": ours["lm_head.weight"],
    }
    if layout == "stacked":
        return ends | {f"decoder.layers.{name}": torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    return ends | {
        f"decoder.layers.{number}.{name}": tensor
        for number, layer in enumerate(layers)
        for name, tensor in (layer if layout == "by_layer" else _by_expert(layer, layout)).items()
    }


def _by_expert(layer: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    split = {name: tensor for name, tensor in layer.items() if ".experts." not in name}
    for expert, (gate_up, down) in enumerate(
        zip(*(layer[f"mlp.experts.experts.linear_fc{i}.weight"] for i in (1, 2)), strict=True)
    ):
        if layout == "grouped":
            split[f"mlp.experts.linear_fc1.weight{expert}"] = gate_up
            split[f"mlp.experts.linear_fc2.weight{expert}"] = down
        elif layout == "sequential":
            split[f"mlp.experts.local_experts.{expert}.linear_fc1.weight"] = gate_up
            split[f"mlp.experts.local_experts.{expert}.linear_fc2.weight"] = down
        else:
            gate, up = gate_up.chunk(2)
            split[f"mlp.experts.experts.{expert}.linear_fc1.weight_w"] = gate
            split[f"mlp.experts.experts.{expert}.linear_fc1.weight_v"] = up
            split[f"mlp.experts.experts.{expert}.linear_fc2.weight"] = down
    return split


def save_torch_dist(folder: Path, tensors: dict[str, Tensor], common: dict[str, Any] | None = None) -> Path:
    """Write tensors, states of modules and a common state as `dist_checkpointing.save` does.

    Args:
        folder: The checkpoint; made if need be.
        tensors: By Megatron's keys.
        common: The common state, which may hold anything; None for one with `ARGS`.
    """
    state = {"args": Namespace(**ARGS), "iteration": 7} if common is None else common
    content: dict[str, Any] = {
        **tensors,
        "decoder.final_layernorm._extra_state/shard_0_1": [torch.empty(0, dtype=torch.uint8)],
        "common_state/shard_0_1": [state],
    }
    folder.mkdir(parents=True, exist_ok=True)
    writer = FileSystemWriter(folder, single_file_per_rank=True)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    save(content, storage_writer=writer, planner=planner, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder
