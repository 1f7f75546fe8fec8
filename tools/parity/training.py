"""A few steps of training, on one rank or on those of a layout, with what the comparison needs taken on the way."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_framework.config.schema import Config
from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.model.decoder import Decoder
from moe_framework.moe.experts.choose import Choice
from moe_framework.optim.adamw import AdamW
from moe_framework.optim.schedule import learning_rate
from moe_framework.precision.policy import DTYPES
from moe_framework.train import step as stepping
from moe_framework.train.build import mesh_of, optimizer_of
from moe_framework.train.model import build_model, choose_backend
from moe_framework.train.step import Objective, StepCounts, StepResult
from tools.parity.inputs import make_loader, over_whole_vocabulary, row_digests
from tools.parity.plan import RANDOM, Options
from tools.parity.tensors import named_parameters

SCALARS = ("loss", "aux_loss", "z_loss", "grad_norm")


@dataclass
class Figures:
    """Numbers of a run that are no tensors.

    Attributes:
        scalars: By name, of each step, as this rank has them.
        tokens: Targets and tokens of each step, over all ranks.
        loads: Token copies of each layer's experts, of each step.
        rows: Global sample index and digest of each row that any rank read, and how many ranks read it; the last
            entry is the batch after the last step.
    """

    scalars: list[dict[str, float]] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)
    loads: list[list[list[int]]] = field(default_factory=list)
    rows: list[dict[tuple[int, str], int]] = field(default_factory=list)


@dataclass
class Run:
    """The objects of a run on this rank.

    Attributes:
        config: Validated.
        mesh: The mesh.
        device: This rank's device.
        model: The parallelised decoder.
        optimizer: Over its parameters.
        experts_backend: What computes the experts.
    """

    config: Config
    mesh: ParallelMesh
    device: torch.device
    model: Decoder
    optimizer: AdamW
    experts_backend: Choice


def build(config: Config, device: torch.device, experts_backend: str | None = None) -> Run:
    """Make the objects of a run.

    Args:
        config: Validated.
        device: This rank's device.
        experts_backend: The reference's, preferred where `experts.backend` is `auto`; the reference itself takes one
            that quantizes where the mode does, although bf16 may be faster: it is what is to be checked.

    Collective: the world; every rank must call.
    """
    mesh = mesh_of(config, device.type)
    quantizing = None if config.precision.mode in DTYPES else "te"
    choice = choose_backend(config, device, preferred=experts_backend or quantizing)
    model = build_model(config, mesh, device, choice)
    return Run(config, mesh, device, model, optimizer_of(config, model), choice)


def train(
    run: Run,
    options: Options,
    *,
    begin: Callable[[int, list, int], None],
    at_gradients: Callable[[Iterator[tuple[str, Tensor]]], None],
    advance: Callable[[int], None],
) -> Figures:
    """Train for the steps to compare, exactly as `train.loop` does.

    Args:
        run: The objects.
        options: Number of steps, seed, and what the rows hold.
        begin: Called before each step with its number, this rank's micro-batches, and the first global sample index.
        at_gradients: Called with the named gradients of the first step, summed and not yet clipped.
        advance: Called after each step with its number.

    Returns:
        The run's figures.

    Collective: the world; every rank must call.
    """
    config, mesh, figures = run.config, run.mesh, Figures()
    objective = Objective(config.moe.aux_loss_coeff, config.moe.z_loss_coeff)
    _before_update(run, at_gradients)
    with make_loader(config, mesh) as loader:
        for step in range(1, options.steps + 1):
            first_sample = loader.consumed_samples
            batches = loader.next_step()
            figures.rows.append(_rows_of_all_ranks(batches))
            if options.data == RANDOM:
                batches = [over_whole_vocabulary(b, config.model.vocab_size, options.seed) for b in batches]
            begin(step, batches, first_sample)
            counts = stepping.agree_on_counts(batches, mesh.world_group, copies=mesh.tp.size())
            _set_learning_rate(run, step - 1)
            result = stepping.train_step(
                run.model,
                run.optimizer,
                [batch.to(run.device) for batch in batches],
                counts,
                mesh=mesh,
                objective=objective,
                clip_norm=config.optim.clip_norm,
            )
            _record(figures, counts, result)
            advance(step)
        figures.rows.append(_rows_of_all_ranks(loader.next_step()))
    return figures


def rate_at(config: Config, step: int) -> float:
    """Return the learning rate of a step, from 0."""
    optim = config.optim
    return learning_rate(
        step,
        lr=optim.lr,
        min_lr=optim.min_lr,
        warmup_steps=optim.warmup_steps,
        max_steps=config.train.max_steps,
        schedule=optim.schedule,
        decay_steps=optim.decay_steps,
    )


def _before_update(run: Run, at_gradients: Callable[[Iterator[tuple[str, Tensor]]], None]) -> None:
    """Show the gradients once, between their last sum and the first update, which may scale them in place."""
    optimizer, update = run.optimizer, run.optimizer.step_clipped

    def observed(norm: Tensor, clip_norm: float) -> None:
        optimizer.step_clipped = update
        at_gradients(_gradients(run.model))
        update(norm, clip_norm)

    optimizer.step_clipped = observed


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in named_parameters(model):
        yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _set_learning_rate(run: Run, steps_done: int) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = rate_at(run.config, steps_done)


def _record(figures: Figures, counts: StepCounts, result: StepResult) -> None:
    figures.scalars.append({name: getattr(result, name) for name in SCALARS})
    figures.tokens.append((counts.num_targets, counts.num_tokens))
    figures.loads.append(result.tokens_per_expert_LE.tolist())


def _rows_of_all_ranks(batches: list) -> dict[tuple[int, str], int]:
    of_ranks: list[list[tuple[int, str]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, row_digests(batches))
    return dict(Counter(row for rows in of_ranks for row in rows))
