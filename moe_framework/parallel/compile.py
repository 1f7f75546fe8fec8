"""torch.compile, of the parts whose shapes do not depend on the routing."""

import torch

from moe_framework.model.block import Block
from moe_framework.model.decoder import Decoder, cross_entropy_sum


def compile_blocks(model: Decoder) -> None:
    """Compile attention, with its norms of queries and keys, and the loss in place; parameter names stay.

    Compiled, the loss reads the logits as they are, and neither makes a float32 copy of them nor of its gradient.
    The MoE layer stays eager: the sizes of its exchanges are decided by each batch, which would break or
    recompile its graph, and its time is in kernels that compilation does not change. The norms of the residual stream
    stay eager too: of a module of torch.nn by itself, torch 2.11 compiles nothing, and does not say so.

    Args:
        model: The decoder, not yet wrapped by FSDP.
    """
    for block in model.layers:
        assert isinstance(block, Block)
        block.attention.compile()
    # The loss over parts of the vocabulary exchanges sums between ranks, and stays eager.
    if model.cross_entropy_sum is cross_entropy_sum:
        model.cross_entropy_sum = torch.compile(cross_entropy_sum)
