"""The model of a config, spread over the mesh and initialised."""

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from moe_framework.config.schema import Config
from moe_framework.distributed.collectives import together
from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.errors import ConfigError
from moe_framework.model.decoder import Decoder
from moe_framework.model.init import initialise
from moe_framework.moe.balancing import Balancing
from moe_framework.moe.dispatch.all_to_all import AllToAllDispatcher
from moe_framework.moe.dispatch.base import TokenDispatcher
from moe_framework.moe.dispatch.local import LocalDispatcher
from moe_framework.moe.dispatch.width import WidthDispatcher
from moe_framework.moe.experts.choose import PLAIN_INSTEAD, Choice, ExpertShape, choose_experts, make_backend
from moe_framework.moe.experts.layer import GroupedExperts
from moe_framework.moe.layer import MoELayer
from moe_framework.moe.router import TopKRouter
from moe_framework.parallel.apply import apply_parallel
from moe_framework.precision.linear import quantize_linears
from moe_framework.precision.modes import MODES
from moe_framework.precision.policy import DTYPES, PrecisionPolicy, precision_policy

logger = logging.getLogger(__name__)


def choose_backend(config: Config, device: torch.device, preferred: str | None = None) -> Choice:
    """Choose the expert backend on rank 0, since two ranks that time the same backends need not agree.

    Args:
        config: Validated.
        device: This rank's device.
        preferred: The backend of the checkpoint that is continued, if any.

    Returns:
        The choice, the same on every rank.

    Raises:
        ConfigError: The device lacks `precision.mode`, or `experts.backend` cannot compute these shapes on it.
        DependencyError: The backend needs a package that is missing.

    Collective: the world; every rank must call.
    """

    def choose() -> Choice:
        policy = precision_policy(config.precision.mode, device)
        return choose_experts(config.experts.backend, expert_shape(config), policy, device, preferred=preferred)

    box = [together(choose if dist.get_rank() == 0 else lambda: None)]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]


def build_model(
    config: Config,
    mesh: ParallelMesh,
    device: torch.device,
    choice: Choice | None = None,
    *,
    draw: Callable[..., None] = initialise,
) -> Decoder:
    """Build this rank's shards of the model, initialised from `train.seed`.

    Args:
        config: Validated.
        mesh: The run's mesh.
        device: This rank's device.
        choice: From `choose_backend`, which is called where it is not given.
        draw: Fills the parameters, called as `initialise` is.

    Returns:
        The decoder under FSDP.

    Raises:
        ConfigError: The device lacks `precision.mode`, or `experts.backend` cannot compute these shapes on it.
        DependencyError: `experts.backend` needs a package that is missing.

    Collective: the world; every rank must call.
    """
    policy = precision_policy(config.precision.mode, device)
    choice = choice or choose_backend(config, device)
    logger.info("precision.mode: %s", policy.mode)
    logger.info("experts.backend: %s (%s)", choice.name, choice.reason)
    model = meta_decoder(config, mesh, policy, choice)
    apply_parallel(
        model,
        mesh,
        device=device,
        precision=policy,
        activation_checkpointing=config.train.activation_checkpointing,
        compile_model=config.train.compile,
    )
    logger.info("drawing the initial weights from train.seed=%d", config.train.seed)
    draw(model, seed=config.train.seed, init_std=config.model.init_std, num_layers=config.model.num_layers)
    return model


def meta_decoder(config: Config, mesh: ParallelMesh, policy: PrecisionPolicy, choice: Choice) -> Decoder:
    """Build the whole decoder on the meta device: shapes without memory.

    Args:
        config: Validated.
        mesh: The run's mesh.
        policy: Formats.
        choice: The expert backend.

    Returns:
        The decoder.
    """
    sizes = config.model
    dispatcher, dispatch_reason = _dispatcher(config, mesh)
    logger.info("dispatcher.backend: %s", dispatch_reason)

    def make_moe(layer: int) -> MoELayer:
        layer_policy, backend = _layer_format(config, layer, policy, choice)
        return MoELayer(
            router=TopKRouter(hidden_size=sizes.hidden_size, num_experts=sizes.num_experts, top_k=sizes.top_k),
            dispatcher=dispatcher,
            experts=GroupedExperts(
                num_experts=sizes.num_experts,
                hidden_size=sizes.hidden_size,
                intermediate_size=sizes.intermediate_size,
                backend=make_backend(backend, expert_shape(config), layer_policy),
            ),
            balancing=Balancing(config.moe.aux_loss, mesh.world_group, mesh.tp_group),
        )

    with torch.device("meta"):
        model = Decoder(
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.resolved_head_dim,
            vocab_size=sizes.vocab_size,
            rope_theta=sizes.rope_theta,
            norm_eps=sizes.norm_eps,
            tie_embeddings=sizes.tie_embeddings,
            qk_norm=sizes.qk_norm,
            make_moe=make_moe,
        )
    if config.precision.attention == "quantized":
        _quantize_attention(model, config, policy)
    return model


def _quantize_attention(model: Decoder, config: Config, policy: PrecisionPolicy) -> None:
    if not MODES[policy.mode].attention:
        raise ConfigError(
            f"precision.attention=quantized is not available in precision.mode={policy.mode}, which "
            f"{config.precision.mode} means here. Set precision.attention=bf16."
        )
    for layer, block in enumerate(model.layers):
        if _is_quantized(config, layer, policy):
            quantize_linears(block.attention, policy.mode)  # pyright: ignore[reportArgumentType]


def expert_shape(config: Config) -> ExpertShape:
    """Return the work of one layer's experts on one rank."""
    sizes, parallel = config.model, config.parallel
    num_tokens = config.train.micro_batch_size * config.data.seq_length // parallel.tp
    return ExpertShape(
        num_local_experts=sizes.num_experts // parallel.ep,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size // parallel.expert_tp,
        num_rows=num_tokens * parallel.expert_tp * sizes.top_k,
        expert_tp=parallel.expert_tp,
        float32_weights=parallel.dp == 1 and parallel.tp == parallel.expert_tp,
    )


def _layer_format(config: Config, layer: int, policy: PrecisionPolicy, choice: Choice) -> tuple[PrecisionPolicy, str]:
    """The formats and backend of one layer: the first and last may stay in bf16."""
    if policy.mode in DTYPES or _is_quantized(config, layer, policy):
        return policy, choice.name
    plain = PrecisionPolicy("bf16", policy.compute_dtype, policy.reduce_dtype)
    return plain, PLAIN_INSTEAD.get(choice.name, choice.name)


def _is_quantized(config: Config, layer: int, policy: PrecisionPolicy) -> bool:
    first, last = config.precision.bf16_first_layers, config.precision.bf16_last_layers
    return policy.mode not in DTYPES and first <= layer < config.model.num_layers - last


def _dispatcher(config: Config, mesh: ParallelMesh) -> tuple[TokenDispatcher, str]:
    name, ep, num_experts = config.dispatcher.backend, config.parallel.ep, config.model.num_experts
    if name == "local" or (name == "auto" and ep == 1):
        dispatcher, reason = LocalDispatcher(num_experts=num_experts), "local (ep=1: every expert is on its rank)"
    else:
        dispatcher = AllToAllDispatcher(num_experts=num_experts, group=mesh.ep_group)
        reason = f"all_to_all (exact exchange over ep={ep})"
    if mesh.expert_tp == 1:
        return dispatcher, reason
    return WidthDispatcher(dispatcher, group=mesh.tp_group), f"{reason}, gathered over expert_tp={mesh.expert_tp}"


def count_parameters(model: Decoder, *, top_k: int, num_experts: int) -> tuple[int, int]:
    """Count parameters.

    Args:
        model: Sharded or not.
        top_k: K.
        num_experts: E.

    Returns:
        All parameters, and those that one token uses in matrix products: K of E experts, no embedding table.
    """
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".moe.experts." in name)
    head = 0 if model.lm_head is None else model.embed.weight.numel()
    return total, total - experts - head + experts * top_k // num_experts
