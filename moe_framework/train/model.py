"""The model of a config, spread over the mesh and initialised."""

import logging

import torch

from moe_framework.config.schema import Config
from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.model.decoder import Decoder
from moe_framework.model.init import initialise
from moe_framework.moe.balancing import Balancing
from moe_framework.moe.dispatch.all_to_all import AllToAllDispatcher
from moe_framework.moe.dispatch.base import TokenDispatcher
from moe_framework.moe.dispatch.local import LocalDispatcher
from moe_framework.moe.experts.choose import BACKENDS, choose_experts
from moe_framework.moe.experts.layer import GroupedExperts
from moe_framework.moe.layer import MoELayer
from moe_framework.moe.router import TopKRouter
from moe_framework.parallel.apply import apply_parallel
from moe_framework.precision.policy import POLICIES

logger = logging.getLogger(__name__)


def build_model(config: Config, mesh: ParallelMesh, device: torch.device) -> Decoder:
    """Build this rank's shards of the model, initialised from `train.seed`.

    Args:
        config: Validated.
        mesh: The run's mesh.
        device: This rank's device.

    Returns:
        The decoder under FSDP.

    Raises:
        ConfigError: `experts.backend` cannot compute these shapes on this device.

    Collective: the world; every rank must call.
    """
    model = meta_decoder(config, mesh, device.type)
    apply_parallel(
        model,
        mesh,
        device=device,
        precision=POLICIES[config.precision.mode],
        activation_checkpointing=config.train.activation_checkpointing,
        compile_model=config.train.compile,
    )
    initialise(model, seed=config.train.seed, init_std=config.model.init_std, num_layers=config.model.num_layers)
    return model


def meta_decoder(config: Config, mesh: ParallelMesh, device_type: str) -> Decoder:
    """Build the whole decoder on the meta device: shapes without memory.

    Args:
        config: Validated.
        mesh: The run's mesh.
        device_type: Where it will run, `cpu` or `cuda`; decides the expert backend.

    Returns:
        The decoder.

    Raises:
        ConfigError: `experts.backend` cannot compute these shapes on this device.
    """
    sizes = config.model
    backend_name, reason = choose_experts(
        config.experts.backend,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        dtype=POLICIES[config.precision.mode].compute_dtype,
        device_type=device_type,
    )
    dispatcher, dispatch_reason = _dispatcher(config, mesh)
    logger.info("experts.backend: %s (%s)", backend_name, reason)
    logger.info("dispatcher.backend: %s", dispatch_reason)

    def make_moe() -> MoELayer:
        return MoELayer(
            router=TopKRouter(hidden_size=sizes.hidden_size, num_experts=sizes.num_experts, top_k=sizes.top_k),
            dispatcher=dispatcher,
            experts=GroupedExperts(
                num_experts=sizes.num_experts,
                hidden_size=sizes.hidden_size,
                intermediate_size=sizes.intermediate_size,
                backend=BACKENDS[backend_name],
            ),
            balancing=Balancing(config.moe.aux_loss, mesh.data_group),
        )

    with torch.device("meta"):
        return Decoder(
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.resolved_head_dim,
            vocab_size=sizes.vocab_size,
            rope_theta=sizes.rope_theta,
            norm_eps=sizes.norm_eps,
            tie_embeddings=sizes.tie_embeddings,
            make_moe=make_moe,
        )


def _dispatcher(config: Config, mesh: ParallelMesh) -> tuple[TokenDispatcher, str]:
    name, ep = config.dispatcher.backend, config.parallel.ep
    if name == "local" or (name == "auto" and ep == 1):
        return LocalDispatcher(num_experts=config.model.num_experts), "local (ep=1: every expert is on its rank)"
    dispatcher = AllToAllDispatcher(num_experts=config.model.num_experts, group=mesh.ep_group)
    return dispatcher, f"all_to_all (exact exchange over ep={ep})"


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
