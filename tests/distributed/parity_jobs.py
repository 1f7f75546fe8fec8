"""What the parity tests compute, and how the ranks of a layout compute it with the framework.

`parity_reference.py` computes the same on one process with plain torch; both return a `Trace`.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moe_framework.config.schema import (
    Config,
    DispatcherConfig,
    ExpertsConfig,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from moe_framework.data.loader import Batch, collate
from moe_framework.distributed.mesh import ParallelMesh, build_mesh
from moe_framework.model.decoder import Decoder
from moe_framework.optim.adamw import build_adamw
from moe_framework.optim.clip import global_grad_norm
from moe_framework.train.model import build_model
from moe_framework.train.step import Objective, accumulate_gradients, agree_on_counts, train_step
from tests.unit.model.builders import SMALL, random_row

IDLE_EXPERT = 5
SEQ_LENGTH = 24
NUM_STEPS = 3
OPTIM: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
OBJECTIVE = Objective(aux_loss_coeff=0.02, z_loss_coeff=0.01)
CLIP_NORM = 0.5  # below the norms met here, so that clipping is active

# Document lengths of each row of the global batch: packed and single documents, with and without padding.
PADDED_ROWS = ((24,), (10, 7), (24,), (5, 5, 14), (3,), (20,), (11, 2, 1), (24,))
# With four data ranks and no accumulation, rank 1 has padding only.
ROWS_WITH_AN_EMPTY_RANK = ((24,), (10, 7), (), (), (3,), (20,), (11, 2, 1), (24,))


@dataclass(frozen=True)
class Spec:
    """What both sides compute.

    Attributes:
        seed: Of the weights and the inputs.
        rows: Document lengths of each row of the global batch.
        aux_loss: `moe.aux_loss`.
        tie_embeddings: `model.tie_embeddings`.
        changes: Other changes to the sizes of the model, as (name, value).
    """

    seed: int
    rows: tuple[tuple[int, ...], ...] = PADDED_ROWS
    aux_loss: Any = "sequence"
    tie_embeddings: bool = False
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def sizes(self) -> ModelConfig:
        """Sizes of the model."""
        return replace(SMALL, tie_embeddings=self.tie_embeddings, **dict(self.changes))


@dataclass(frozen=True)
class Layout:
    """How the ranks compute it.

    Attributes:
        dp: `parallel.dp`.
        ep: `parallel.ep`.
        accumulation: Micro-batches per step.
        checkpointing: `train.activation_checkpointing`.
        backend: `experts.backend`.
        compiled: `train.compile`.
        mode: `precision.mode`.
        dispatcher: `dispatcher.backend`.
        tp: `parallel.tp`.
        dp_replicate: `parallel.dp_replicate`.
        expert_tp: `parallel.expert_tp`.
    """

    dp: int
    ep: int
    accumulation: int = 1
    checkpointing: Any = "none"
    backend: Any = "grouped_mm"
    compiled: bool = False
    mode: Any = "fp32"
    dispatcher: Any = "auto"
    tp: int = 1
    dp_replicate: int = 1
    expert_tp: int = 1

    def __str__(self) -> str:
        axes = {"dp": self.dp, "ep": self.ep, "tp": self.tp, "replicas": self.dp_replicate, "etp": self.expert_tp}
        degrees = "-".join(f"{axis}{degree}" for axis, degree in axes.items() if degree > 1 or axis in ("dp", "ep"))
        return f"{degrees}-acc{self.accumulation}-{self.checkpointing}-{self.backend}"

    @property
    def degrees(self) -> dict[str, int]:
        """Arguments of `build_mesh`."""
        return {name: getattr(self, name) for name in ("dp", "ep", "tp", "dp_replicate", "expert_tp")}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.ep * self.tp


@dataclass
class Trace:
    """Everything that must not depend on the layout, by parameter name; whole tensors.

    Attributes:
        initial: Parameters before the first step.
        gradients: Of the first step, before clipping.
        parameters: After the last step.
        exp_avg: First Adam moments after the last step.
        exp_avg_sq: Second Adam moments after the last step.
        scalars: Loss, aux_loss, z_loss, grad_norm and summed routing entropy of each step.
        tokens_per_expert: [L, E] of each step.
        differing_replicas: Names of parameters and moments that are not the same in all replicas at the end.
        margin: Smallest distance of a token's K-th from its (K+1)-th logit; of the reference only.
    """

    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]
    scalars: list[dict[str, float]]
    tokens_per_expert: list[Tensor]
    differing_replicas: list[str] = field(default_factory=list)
    margin: float = float("inf")


def global_batch(spec: Spec, step: int) -> list:
    """Return the rows of one step."""
    rng = np.random.default_rng((spec.seed, step))
    return [random_row(rng, list(lengths), SEQ_LENGTH, spec.sizes.vocab_size) for lengths in spec.rows]


def micro_batches(spec: Spec, step: int, *, data_rank: int, num_data_ranks: int, accumulation: int) -> list[Batch]:
    """Return one rank's share, cut as the loader cuts it."""
    rows = global_batch(spec, step)
    size = len(rows) // (num_data_ranks * accumulation)
    starts = [(micro * num_data_ranks + data_rank) * size for micro in range(accumulation)]
    return [collate(rows[start : start + size], tuple(range(start, start + size))) for start in starts]


@torch.no_grad()
def idle_one_expert(model: Decoder) -> None:
    """Make sure that IDLE_EXPERT is never chosen.

    Channel 0 of every embedding is about 1, ten times the others' scale, so that it stays large and positive in
    the residual stream; only the idle expert's score depends on it, negatively. It is not the same for all tokens:
    a tied head would then have a gradient of exactly zero there, whose rounding errors AdamW would scale up.
    """
    embedding = whole(model.embed.weight)
    embedding[:, 0] += 1.0
    put(model.embed.weight, embedding)
    for block in model.layers:
        router: nn.Parameter = block.moe.router.weight  # pyright: ignore
        scores = whole(router)
        scores[:, 0] = 0.0
        scores[IDLE_EXPERT, 0] = -2.0
        put(router, scores)


def whole(tensor: Tensor) -> Tensor:
    """Gather a copy of a whole tensor, in the shape of the plain model. Collective for a DTensor."""
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    return full.flatten(1, 2) if full.dim() == 4 else full


def put(parameter: Tensor, value: Tensor) -> None:
    """Write this rank's shard of a whole tensor."""
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return whole parameters by name. Collective."""
    return {name: whole(p) for name, p in model.named_parameters()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return whole gradients by name; None is an error. Collective."""
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        gradients[name] = whole(parameter.grad)
    return gradients


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> dict[str, Tensor]:
    """Return whole Adam moments by parameter name. Collective."""
    return {name: whole(optimizer.state[p][key]) for name, p in model.named_parameters()}


def replicas_differ(tensor: Tensor) -> bool:
    """Return whether ranks that should hold the same values do not. Collective for a DTensor."""
    if not isinstance(tensor, DTensor):
        return False
    differ = False
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            group = tensor.device_mesh.get_group(axis)
            own = tensor.to_local().detach()
            others = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(others, own.contiguous(), group=group)
            differ |= not all(torch.equal(other, own) for other in others)
    return differ


def config_of(spec: Spec, layout: Layout) -> Config:
    """Return the configuration of one run."""
    return Config(
        device="cpu",
        parallel=ParallelConfig(**layout.degrees),
        model=spec.sizes,
        moe=MoeConfig(spec.aux_loss, OBJECTIVE.aux_loss_coeff, OBJECTIVE.z_loss_coeff),
        experts=ExpertsConfig(layout.backend),
        dispatcher=DispatcherConfig(layout.dispatcher),
        precision=PrecisionConfig(layout.mode),
        train=TrainConfig(
            seed=spec.seed, activation_checkpointing=layout.checkpointing, compile=layout.compiled, max_steps=NUM_STEPS
        ),
    )


def built(spec: Spec, layout: Layout) -> tuple[Decoder, ParallelMesh]:
    """Build the model of a layout. Collective."""
    mesh = build_mesh("cpu", **layout.degrees)
    model = build_model(config_of(spec, layout), mesh, torch.device("cpu"))
    idle_one_expert(model)
    return model, mesh


def train(spec: Spec, layout: Layout) -> Trace:
    """Train on the ranks of a layout; the trace's tensors come from rank 0, its scalars from every rank."""
    model, mesh = built(spec, layout)
    optimizer = build_adamw(model, **OPTIM, compiled=layout.compiled)
    trace = Trace(parameters_of(model), {}, {}, {}, {}, [], [])
    unclipped = float("nan")
    for step in range(NUM_STEPS):
        batches = micro_batches(
            spec,
            step,
            data_rank=mesh.data_rank,
            num_data_ranks=mesh.num_data_ranks,
            accumulation=layout.accumulation,
        )
        counts = agree_on_counts(batches, mesh.data_group)
        if step == 0:
            accumulate_gradients(model, batches, counts, OBJECTIVE)
            trace.gradients.update(gradients_of(model))
            unclipped = global_grad_norm(model.parameters()).item()
            optimizer.zero_grad()
        result = train_step(model, optimizer, batches, counts, mesh=mesh, objective=OBJECTIVE, clip_norm=CLIP_NORM)
        assert result.applied
        assert step > 0 or result.grad_norm == unclipped
        names = ("loss", "aux_loss", "z_loss", "grad_norm")
        scalars = {name: getattr(result, name) for name in names}
        trace.scalars.append(scalars | {"entropy": result.entropy_L.sum().item()})
        trace.tokens_per_expert.append(result.tokens_per_expert_LE)
    trace.parameters.update(parameters_of(model))
    trace.exp_avg.update(moments_of(model, optimizer, "exp_avg"))
    trace.exp_avg_sq.update(moments_of(model, optimizer, "exp_avg_sq"))
    for name, parameter in model.named_parameters():
        tensors = {"parameter": parameter, **optimizer.state[parameter]}
        trace.differing_replicas.extend(f"{name}: {key}" for key, tensor in tensors.items() if replicas_differ(tensor))
    if dist.get_rank() > 0:
        for tensors in (trace.initial, trace.gradients, trace.parameters, trace.exp_avg, trace.exp_avg_sq):
            tensors.clear()
    return trace
