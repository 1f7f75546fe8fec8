"""The reference of the parity tests: one process and plain torch.

No FSDP, no DTensor, no dispatcher with communication, no accumulation, and torch's own clipping and unfused AdamW.
"""

import torch
from torch import nn

from moe_framework.data.loader import collate
from moe_framework.moe.router import Routing, TopKRouter
from tests.distributed.parity_jobs import (
    CLIP_NORM,
    NUM_STEPS,
    OBJECTIVE,
    OPTIM,
    Spec,
    Trace,
    global_batch,
    gradients_of,
    idle_one_expert,
    moments_of,
    parameters_of,
)
from tests.unit.model.builders import plain_decoder
from tools.parity.rounding import round_weights


def reference(spec: Spec, *, rounding: int | None = None) -> Trace:
    """Train on one process, the whole global batch at once, with plain torch around the model.

    Args:
        spec: What to compute.
        rounding: Seed of `tools.parity.rounding.round_weights` for the initial weights; None leaves them as they are.
    """
    model = plain_decoder(spec.sizes, aux_loss=spec.aux_loss, seed=spec.seed)
    idle_one_expert(model)
    if rounding is not None:
        round_weights(model, rounding)
    margins: list[float] = []
    for router in (m for m in model.modules() if isinstance(m, TopKRouter)):
        router.register_forward_hook(lambda _router, _x, routing: margins.append(_margin(spec.sizes.top_k, routing)))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIM["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}],
        lr=OPTIM["lr"],
        betas=(OPTIM["beta1"], OPTIM["beta2"]),
        eps=OPTIM["eps"],
        foreach=False,
        fused=False,
    )
    trace = Trace(parameters_of(model), {}, {}, {}, {}, [], [])
    for step in range(NUM_STEPS):
        batch = collate(global_batch(spec, step), tuple(range(len(spec.rows))))
        num_layers = spec.sizes.num_layers
        out = model(
            batch.tokens,
            batch.positions,
            batch.targets,
            document_ids_BS=batch.document_ids,
            valid_index_T=batch.valid_index,
        )
        # A batch may have no target at all: a mean over nothing is 0.
        loss = out.loss / max(batch.num_targets, 1)
        aux_loss, z_loss = out.aux_loss / batch.num_tokens, out.z_loss / batch.num_tokens
        (loss + OBJECTIVE.aux_loss_coeff * aux_loss + OBJECTIVE.z_loss_coeff * z_loss).backward()
        if step == 0:
            trace.gradients.update(gradients_of(model))
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        trace.scalars.append(
            {
                "loss": loss.item(),
                "aux_loss": aux_loss.item() / num_layers,
                "z_loss": z_loss.item() / num_layers,
                "grad_norm": norm.item(),
                "entropy": out.entropy_L.sum().item(),
            }
        )
        trace.tokens_per_expert.append(out.tokens_per_expert_LE)
    trace.parameters.update(parameters_of(model))
    trace.exp_avg.update(moments_of(model, optimizer, "exp_avg"))
    trace.exp_avg_sq.update(moments_of(model, optimizer, "exp_avg_sq"))
    trace.margin = min(margins)
    return trace


def _margin(top_k: int, routing: Routing) -> float:
    sorted_logits = routing.logits_TE.detach().sort(dim=-1, descending=True).values
    return (sorted_logits[:, top_k - 1] - sorted_logits[:, top_k]).min().item()
