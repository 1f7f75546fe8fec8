"""torch.compile, of the parts whose shapes do not depend on the routing."""

import torch

from moe_framework.model.block import Block
from moe_framework.model.decoder import Decoder, cross_entropy_sum


def compile_blocks(model: Decoder) -> None:
    """Compile attention, norms and the loss in place; parameter names stay.

    Compiled, the loss reads the logits as they are, and neither makes a float32 copy of them nor of its gradient.
    The MoE layer stays eager: the sizes of its exchanges are decided by each batch, which would break or
    recompile its graph, and its time is in kernels that compilation does not change.

    Args:
        model: The decoder, not yet wrapped by FSDP.
    """
    for block in model.layers:
        assert isinstance(block, Block)
        for module in (block.attention_norm, block.attention, block.moe_norm):
            module.compile()
    # The loss over parts of the vocabulary exchanges sums between ranks, and stays eager.
    if model.cross_entropy_sum is cross_entropy_sum:
        model.cross_entropy_sum = torch.compile(cross_entropy_sum)
