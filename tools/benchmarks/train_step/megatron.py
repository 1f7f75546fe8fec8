"""The training step of Megatron-Core: Transformer Engine layers, distributed optimizer with fp32 masters, EP."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_framework.config.schema import Config
from moe_framework.errors import ConfigError, DependencyError
from tools.benchmarks.train_step.contender import Contender, Facts, random_tokens

FAVOURS = "nobody in the update; the peer sums gradients in bf16"
FAVOURS_FP8 = FAVOURS + ", and computes attention's projections in FP8, too"


def build_megatron(config: Config, device: torch.device, *, fp8: bool, seed: int, data_rank: int) -> Contender:
    """Build a GPTModel with the same sizes, its experts over all ranks.

    Args:
        config: Sizes, batch, AdamW's numbers, clipping and the weight of the load-balancing loss.
        device: This rank's, a CUDA device.
        fp8: FP8 with one scale per tensor (current scaling), instead of bf16.
        seed: Of tokens and weights.
        data_rank: This rank.

    Returns:
        The contender.

    Raises:
        DependencyError: Megatron-Core or Transformer Engine cannot be imported.
        ConfigError: There is no GPU, or the ranks do not divide the experts.

    Collective: the world; every rank must call.
    """
    if device.type != "cuda":
        raise ConfigError("--peers=megatron_*: a MoE model of Megatron-Core does not run on a CPU. Leave it out.")
    num_ranks = dist.get_world_size()
    if config.model.num_experts % num_ranks:
        raise ConfigError(
            f"--peers=megatron_*: {num_ranks} ranks must divide model.num_experts={config.model.num_experts}, since "
            "its experts are spread over all ranks. Leave it out, or start another number of ranks."
        )
    core = _import_megatron()
    if not core.parallel_state.model_parallel_is_initialized():
        core.parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=num_ranks)
    core.seed(seed)
    model = _model(core, config, device, fp8=fp8, num_ranks=num_ranks)
    optimizer = _optimizer(core, config, model)
    tokens, targets = random_tokens(config, device, seed=seed, data_rank=data_rank)
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    mask = (targets >= 0).float()
    targets = targets.clamp(min=0)

    def step() -> torch.Tensor:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        per_token = model(tokens, positions, None, labels=targets)
        loss = (per_token * mask).sum() / mask.sum()
        loss.backward()
        core.finalize_model_grads([model])
        optimizer.step()
        return loss.detach()

    own = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for p in model.parameters() if not getattr(p, "allreduce", True))
    facts = Facts(
        precision="fp8_current" if fp8 else "bf16",
        master_weights="fp32",
        clipping=config.optim.clip_norm > 0,
        optimizer_states="fp32",
        favours=FAVOURS_FP8 if fp8 else FAVOURS,
        notes=f"ep={num_ranks}, all-to-all, grouped GEMM, fused permutation and cross entropy, "
        f"router {'not fused' if fp8 else 'fused'}, aux loss {config.moe.aux_loss_coeff:g}",
    )
    return Contender(step, own + experts * (num_ranks - 1), facts)


def _model(core: Any, config: Config, device: torch.device, *, fp8: bool, num_ranks: int) -> Any:
    sizes = config.model
    # The fused router fails in backward together with FP8's padding (0.19.2), so there it is not fused.
    formats = ({"fp8": "hybrid", "fp8_recipe": "tensorwise", "moe_router_padding_for_fp8": True} if fp8 else {}) | {
        "moe_router_fusion": not fp8
    }
    transformer = core.TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        ffn_hidden_size=sizes.intermediate_size,
        moe_ffn_hidden_size=sizes.intermediate_size,
        num_attention_heads=sizes.num_heads,
        num_query_groups=sizes.num_kv_heads,
        kv_channels=sizes.resolved_head_dim,
        num_moe_experts=sizes.num_experts,
        moe_router_topk=sizes.top_k,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=config.moe.aux_loss_coeff,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        moe_permute_fusion=True,
        expert_model_parallel_size=num_ranks,
        qk_layernorm=sizes.qk_norm,
        layernorm_epsilon=sizes.norm_eps,
        normalization="RMSNorm",
        init_method_std=sizes.init_std,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        apply_rope_fusion=True,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        **formats,
    )
    spec = core.layer_spec(num_experts=sizes.num_experts, moe_grouped_gemm=True, qk_layernorm=sizes.qk_norm)
    model = core.GPTModel(
        transformer,
        spec,
        vocab_size=sizes.vocab_size,
        max_sequence_length=config.data.seq_length,
        position_embedding_type="rope",
        rotary_base=int(sizes.rope_theta),
        share_embeddings_and_output_weights=sizes.tie_embeddings,
    )
    ddp = core.DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=num_ranks > 1, grad_reduce_in_fp32=False
    )
    return core.DistributedDataParallel(transformer, ddp, model.to(device).bfloat16())


def _optimizer(core: Any, config: Config, model: Any) -> Any:
    optim = config.optim
    return core.get_megatron_optimizer(
        core.OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_eps=optim.eps,
            clip_grad=optim.clip_norm,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        [model],
    )


class _Core:
    """The names of Megatron-Core that the step uses."""

    def __init__(self):
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.parallel_state = parallel_state
        self.DistributedDataParallel = DistributedDataParallel
        self.DistributedDataParallelConfig = DistributedDataParallelConfig
        self.finalize_model_grads = finalize_model_grads
        self.layer_spec = get_gpt_layer_with_transformer_engine_spec
        self.GPTModel = GPTModel
        self.OptimizerConfig = OptimizerConfig
        self.get_megatron_optimizer = get_megatron_optimizer
        self.seed = model_parallel_cuda_manual_seed
        self.TransformerConfig = TransformerConfig


def _import_megatron() -> _Core:
    try:
        return _Core()
    except Exception as error:  # a broken installation raises more than ImportError
        raise DependencyError(
            f"peers megatron_* need megatron-core and Transformer Engine, which failed to import "
            f"({type(error).__name__}: {error}). Install '.[megatron,te]' or leave them out of --peers."
        ) from error
