"""The training step of Hugging Face transformers: bf16 parameters, fused AdamW, FSDP2 on several ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from moe_framework.config.schema import Config, ModelConfig
from moe_framework.errors import DependencyError
from tools.benchmarks.train_step.contender import Contender, Facts, random_tokens

FAVOURS = "the peer: bf16 moments and no fp32 masters to update, bf16 gradient sums, no load-balancing loss"


def build_hugging_face(
    config: Config, device: torch.device, *, experts: str, seed: int, data_rank: int, clip: bool
) -> Contender:
    """Build MixtralForCausalLM, or Qwen3MoeForCausalLM where `model.qk_norm` is set, with the same sizes.

    Args:
        config: Sizes, batch and AdamW's numbers.
        device: This rank's.
        experts: transformers' `experts_implementation`: `eager` or `grouped_mm`.
        seed: Of tokens and weights.
        data_rank: This rank.
        clip: Whether to clip gradients to `optim.clip_norm`.

    Returns:
        The contender.

    Raises:
        DependencyError: transformers is missing.

    Collective: the world; every rank must call.
    """
    torch.manual_seed(seed)
    model = make_model(config.model, device, experts=experts, max_positions=config.data.seq_length)
    num_parameters = sum(p.numel() for p in model.parameters())
    num_ranks = dist.get_world_size()
    if num_ranks > 1:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optim = config.optim
    clip = clip and optim.clip_norm > 0
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=True,
    )
    tokens, _ = random_tokens(config, device, seed=seed, data_rank=data_rank)

    def step() -> torch.Tensor:
        # transformers shifts the labels itself.
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    facts = Facts(
        precision="bf16",
        master_weights="none",
        clipping=clip,
        optimizer_states="bf16",
        favours=FAVOURS if clip else FAVOURS + ", no clipping",
        notes=f"{type(model).__name__}, SDPA, experts {experts}" + (", FSDP2 per layer" if num_ranks > 1 else ""),
    )
    return Contender(step, num_parameters, facts)


def make_model(sizes: ModelConfig, device: torch.device, *, experts: str, max_positions: int) -> Any:
    """Make the model in bf16 on the device, with random weights.

    Args:
        sizes: Of the model.
        device: Where.
        experts: `eager` or `grouped_mm`.
        max_positions: Longest row.

    Returns:
        The model, in training mode.

    Raises:
        DependencyError: transformers is missing.
    """
    try:
        import transformers
    except Exception as error:  # a broken installation raises more than ImportError
        raise DependencyError(
            f"peers hf_eager and hf_grouped_mm need transformers, which failed to import ({type(error).__name__}). "
            "Install '.[hf]' or leave them out of --peers."
        ) from error
    make_config: Any = transformers.Qwen3MoeConfig if sizes.qk_norm else transformers.MixtralConfig
    make: Any = transformers.Qwen3MoeForCausalLM if sizes.qk_norm else transformers.MixtralForCausalLM
    particular = (
        {"num_experts": sizes.num_experts, "moe_intermediate_size": sizes.intermediate_size, "norm_topk_prob": True}
        if sizes.qk_norm
        else {"num_local_experts": sizes.num_experts}
    )
    config = make_config(
        **particular,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.resolved_head_dim,
        num_experts_per_tok=sizes.top_k,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        rms_norm_eps=sizes.norm_eps,
        tie_word_embeddings=sizes.tie_embeddings,
        output_router_logits=False,
        initializer_range=sizes.init_std,
    )
    with device:
        model = make._from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation=experts
        )
    return model.train()
