"""What the ranks of the tests with Megatron-Core run. Imported by a pool's processes."""

import sys
from argparse import Namespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def why_not_importable() -> str | None:
    """Import Megatron-Core; the reason if that fails."""
    # 0.19 refuses nvidia-resiliency-ext below 0.6, which needs a newer glibc than some machines have, and works
    # without it.
    kept = sys.modules.pop("nvidia_resiliency_ext", None)
    sys.modules["nvidia_resiliency_ext"] = None  # pyright: ignore[reportArgumentType]
    try:
        import megatron.core  # noqa: F401
    except Exception as error:  # an optional dependency may fail in any way
        return f"megatron-core cannot be imported ({type(error).__name__}: {error})"
    finally:
        del sys.modules["nvidia_resiliency_ext"]
        if kept is not None:
            sys.modules["nvidia_resiliency_ext"] = kept
    return None


def save_at(folder: str, sizes: dict[str, Any], ep: int, options: dict[str, Any]) -> dict[str, np.ndarray]:
    """Save a random model as Megatron does; return this rank's weights, named as they are in the module.

    Collective: all ranks.
    """
    model = _build(sizes, ep)
    _fill(model, ep)
    from megatron.core import dist_checkpointing

    content = dict(model.sharded_state_dict(metadata=options or None))
    args = Namespace(
        num_attention_heads=sizes["num_heads"],
        moe_router_topk=sizes["top_k"],
        max_position_embeddings=sizes["max_positions"],
        rotary_base=sizes["rope_theta"],
        norm_epsilon=sizes["norm_eps"],
        params_dtype=torch.float32,
    )
    # The saving waits for the GPU, of which there is none.
    with mock.patch("torch.cuda.synchronize"), mock.patch("torch.cuda.current_device", return_value="cpu"):
        dist_checkpointing.save({**content, "args": args, "iteration": 7}, folder, content_metadata=options)
    return _weights(model)


def load_at(folder: str, sizes: dict[str, Any], ep: int) -> dict[str, Any]:
    """Load a checkpoint as Megatron does, strictly; return the common state's `args` and this rank's weights.

    Collective: all ranks.
    """
    model = _build(sizes, ep)
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    wanted = dict(model.sharded_state_dict())
    state: Any = dist_checkpointing.load(wanted, folder, strict="raise_unexpected")
    model.load_state_dict({name: state[name] for name in wanted}, strict=True)
    return {"args": vars(state["args"]), "weights": _weights(model)}


def _build(sizes: dict[str, Any], ep: int) -> Any:
    reason = why_not_importable()
    assert reason is None, reason
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    spec: Any = get_gpt_layer_local_spec(
        num_experts=sizes["num_experts"], qk_layernorm=sizes["qk_norm"], normalization="RMSNorm"
    )
    # Transformer Engine's layers, which need a GPU, don't have this norm inside the experts' first matrix.
    del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    config = TransformerConfig(
        num_layers=sizes["num_layers"],
        hidden_size=sizes["hidden_size"],
        ffn_hidden_size=sizes["intermediate_size"],
        moe_ffn_hidden_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_heads"],
        num_query_groups=sizes["num_kv_heads"],
        kv_channels=sizes["head_dim"],
        num_moe_experts=sizes["num_experts"],
        moe_router_topk=sizes["top_k"],
        expert_model_parallel_size=ep,
        moe_token_dispatcher_type="allgather",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=sizes["qk_norm"],
        use_cpu_initialization=True,
    )
    return GPTModel(
        config,
        spec,
        vocab_size=sizes["padded_vocab_size"],
        max_sequence_length=sizes["max_positions"],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=sizes["tie_embeddings"],
    )


@torch.no_grad()
def _fill(model: Any, ep: int) -> None:
    rank = torch.distributed.get_rank() % ep
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        seed = 1000 * number + (1 + rank if ".local_experts." in name else 0)
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


def _weights(model: Any) -> dict[str, np.ndarray]:
    # As arrays: Megatron exchanges the function that tensors are unpickled with for one of its own.
    return {name: value.detach().numpy() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
