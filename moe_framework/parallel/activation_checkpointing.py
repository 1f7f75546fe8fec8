"""Activation checkpointing: recompute a block in backward instead of keeping its activations.

Whatever the mode, the router's top-k is kept, because a recomputation that breaks a near-tie the other way would
route tokens elsewhere than the forward pass did.

Source: Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
"""

from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# These two register operators of their own.
import moe_framework.moe.experts.scaled_mm
import moe_framework.moe.experts.sequential  # noqa: F401
from moe_framework.model.decoder import Decoder

_aten = torch.ops.aten
ROUTING = (_aten.topk.default,)
PRODUCTS_AND_EXCHANGES = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten._grouped_mm.default,
    torch.ops.moe_framework.expert_products.default,
    torch.ops.moe_framework.scaled_products.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.wait_tensor.default,
)
KEPT = {"full": frozenset(ROUTING), "selective": frozenset(ROUTING + PRODUCTS_AND_EXCHANGES)}


def apply_activation_checkpointing(model: Decoder, mode: str) -> None:
    """Checkpoint every block.

    Args:
        model: The decoder.
        mode: `none`; `selective`: keep matrix products, attention and exchanges between ranks, though not the
            projections of a compiled attention, which are no operators that the policy lists; `full`: keep each
            block's input and its routing choice.
    """
    if mode == "none":
        return
    policy = partial(_policy, KEPT[mode])
    for block in model.layers:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def _policy(kept: frozenset, _context, op, *_args, **_kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE
