"""AdamW with decoupled decay of matrices only, and an update that clips.

The sharded parameters are float32 whatever the compute format, so they are the master weights.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from moe_framework.distributed.shards import local_part

# In its cache on disk torch 2.11 takes compilations for the same that differ only in the numbers passed in: a run would
# update with the betas and eps of another run on the machine.
_OPTIONS: dict[str, Any] = {"fx_graph_cache": False}


class AdamW(torch.optim.AdamW):
    """torch's AdamW, whose update can scale the gradients as it reads them.

    Source: Decoupled Weight Decay Regularization, arXiv:1711.05101, algorithm 2.

    Args:
        groups: Parameter groups with their `weight_decay`; all DTensors or all plain tensors, float32.
        compiled: Compile the update. The generated kernel reads and writes each value once; torch's fused kernel
            stores the scaled gradient as well (6.9 and 9.7 ms per 1e9 parameters on an H200).
        options: torch's.
    """

    def __init__(self, groups: Any, *, compiled: bool = False, **options: Any):
        super().__init__(groups, fused=True, **options)
        self._compiled_update = torch.compile(_update, dynamic=True, options=_OPTIONS) if compiled else None

    @torch.no_grad()
    def step_clipped(self, norm: Tensor, clip_norm: float) -> None:
        """Update with gradients scaled so that their global norm is at most `clip_norm`; never syncs with the host.

        Args:
            norm: From `global_grad_norm`, of all its parameters.
            clip_norm: Largest norm; 0 for no clipping.
        """
        excess = norm.new_ones(()) if clip_norm == 0 else ((norm + 1e-6) / clip_norm).clamp(min=1.0)
        if self._compiled_update is not None:
            for group in self.param_groups:
                self._update_compiled(group, excess)
            return
        if clip_norm != 0:
            # The attribute by which torch.amp.GradScaler hands its scale to the fused optimizers.
            self.grad_scale = excess
        self.step()
        self.grad_scale = None

    def _update_compiled(self, group: dict[str, Any], excess: Tensor) -> None:
        lists: tuple[list[Tensor], ...] = ([], [], [], [], [], [])
        params, grads, first, second, _, steps = lists
        self._init_group(group, *lists)
        if not params:
            return
        beta1, beta2 = group["betas"]
        # Tensors, because a number that changes would be compiled anew each step.
        lr = torch.full((), group["lr"], dtype=torch.float32, device=steps[0].device)
        assert self._compiled_update is not None
        # One tensor after another, flat: one kernel serves all shapes.
        flat = [[_flat(tensor) for tensor in part] for part in (params, grads, first, second)]
        for param, grad, mean, variance, step in zip(*flat, steps, strict=True):
            self._compiled_update(
                param, grad, mean, variance, step, lr, excess, beta1, beta2, group["weight_decay"], group["eps"]
            )


def _flat(tensor: Tensor) -> Tensor:
    return local_part(tensor).detach().view(-1)


def _update(param, grad, first, second, step, lr, excess, beta1, beta2, weight_decay, eps) -> None:
    adamw(
        [param],
        [grad / excess],
        [first],
        [second],
        [],
        [step],
        foreach=False,
        capturable=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


def build_adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    compiled: bool = False,
) -> AdamW:
    """Make the optimizer, with one group for what decays and one for what does not.

    Args:
        model: Its parameters are all DTensors or all plain tensors, float32.
        lr: Learning rate; the schedule overwrites it each step.
        weight_decay: Decay of parameters with two or more dims; norms have one and do not decay.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        compiled: Compile the update.

    Returns:
        The optimizer.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, compiled=compiled)
