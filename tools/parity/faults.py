"""Known errors put into a layout's ranks on purpose, to see that the check finds and names them.

They replace functions of the framework for the time of a `with` block; nothing in the framework knows of them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from moe_framework.moe.experts.base import ExpertBackend
from moe_framework.moe.experts.layer import GroupedExperts
from moe_framework.moe.router import TopKRouter
from moe_framework.optim import clip
from moe_framework.parallel import apply, fsdp
from moe_framework.train import step as stepping
from tools.parity.layouts import Layout
from tools.parity.tensors import swapped
from tools.parity.training import Run

EXPERTS = ".moe.experts."
STALE = "layers.0.attention.o_proj.weight"
DRIFTING = "layers.0.moe.router.weight"
DRIFT = 2.0**-20


@dataclass(frozen=True)
class Fault:
    """How one error is made.

    Attributes:
        during: Makes it for the time of a block, around building and training; called on every rank.
        after_step: Makes it after each step; called on every rank.
    """

    during: Callable[[Layout], AbstractContextManager[Any]] = lambda _layout: nullcontext()
    after_step: Callable[[Run], None] = lambda _run: None


@contextmanager
def _expert_divisor(layout: Layout) -> Iterator[None]:
    """An average over the ranks that share an expert, where the loss is one over all ranks: ep times too large."""
    original, factor = stepping.accumulate_gradients, layout.ep if layout.ep > 1 else 1 / layout.world_size

    def scaled(model, *arguments):
        output = original(model, *arguments)
        for name, parameter in model.named_parameters():
            if EXPERTS in name:
                parameter.grad.mul_(factor)
        return output

    with mock.patch.object(stepping, "accumulate_gradients", scaled):
        yield


@contextmanager
def _router_tp_sum(_layout: Layout) -> Iterator[None]:
    """Share the router over the ranks that share the projections, as if its tokens were not split over tp."""
    original_apply, original_shard = apply.apply_fsdp, fsdp.fully_shard

    def applied(model, mesh, precision):
        def shard(modules, **options):
            if isinstance(modules, TopKRouter):
                options["mesh"] = mesh.replicated(mesh.dense)
            return original_shard(modules, **options)

        with mock.patch.object(fsdp, "fully_shard", shard):
            original_apply(model, mesh, precision)

    with mock.patch.object(apply, "apply_fsdp", applied):
        yield


@contextmanager
def _norm_ep_sum(_layout: Layout) -> Iterator[None]:
    """Take each rank's own experts for all of them."""
    original = clip._sum_of_squares

    def without_ep(key: tuple, gradients: list[Tensor]) -> Tensor:
        if key and "ep" in (key[0].mesh_dim_names or ()):
            mesh, placements = key
            names = mesh.mesh_dim_names
            key = (mesh, tuple(Replicate() if n == "ep" else p for n, p in zip(names, placements, strict=True)))
        return original(key, gradients)

    with mock.patch.object(clip, "_sum_of_squares", without_ep):
        yield


@contextmanager
def _aux_dp(layout: Layout) -> Iterator[None]:
    """Average the loss over ranks once more."""
    original = stepping.accumulate_gradients

    def averaged(model, batches, counts, objective):
        weaker = replace(objective, aux_loss_coeff=objective.aux_loss_coeff / layout.world_size)
        return original(model, batches, counts, weaker)

    with mock.patch.object(stepping, "accumulate_gradients", averaged):
        yield


@contextmanager
def _gate_up_swap(_layout: Layout) -> Iterator[None]:
    """Read the stored weights as up first, gate second."""
    original = GroupedExperts.__init__

    def init(self: GroupedExperts, *, backend: ExpertBackend, **sizes: int) -> None:
        def up_first(
            gate_up: Tensor, down: Tensor, rows_RD: Tensor, probs_R: Tensor, tokens_per_expert: Tensor
        ) -> Tensor:
            return backend(swapped(gate_up), down, rows_RD, probs_R, tokens_per_expert)

        original(self, backend=up_first, **sizes)

    with mock.patch.object(GroupedExperts, "__init__", init):
        yield


@torch.no_grad()
def _forget_moment(run: Run) -> None:
    run.optimizer.state[dict(run.model.named_parameters())[STALE]]["exp_avg"].zero_()


@torch.no_grad()
def _drift(run: Run) -> None:
    parameter = dict(run.model.named_parameters())[DRIFTING]
    if run.mesh.root["dp_replicate"].get_local_rank() == 1 and isinstance(parameter, DTensor):
        parameter.to_local().mul_(1 + DRIFT)


FAULTS = {
    "expert_divisor": Fault(_expert_divisor),
    "router_tp_sum": Fault(_router_tp_sum),
    "norm_ep_sum": Fault(_norm_ep_sum),
    "aux_dp": Fault(_aux_dp),
    "gate_up_swap": Fault(_gate_up_swap),
    "stale_moment": Fault(after_step=_forget_moment),
    "replica_drift": Fault(after_step=_drift),
}
