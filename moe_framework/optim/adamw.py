"""AdamW with decoupled decay of matrices only.

The sharded parameters that FSDP holds are float32 whatever the compute format, so they are the master weights.
"""

import torch
from torch import nn


def build_adamw(
    model: nn.Module, *, lr: float, weight_decay: float, beta1: float, beta2: float, eps: float
) -> torch.optim.AdamW:
    """Make the optimizer, with one group for what decays and one for what does not.

    Source: Decoupled Weight Decay Regularization, arXiv:1711.05101, algorithm 2.

    Args:
        model: Its parameters are all DTensors or all plain tensors, float32.
        lr: Learning rate; the schedule overwrites it each step.
        weight_decay: Decay of parameters with two or more dims; norms have one and do not decay.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.

    Returns:
        The optimizer.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, fused=True)
