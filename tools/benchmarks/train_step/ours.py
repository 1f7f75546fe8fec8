"""Our training step, through the modules that train."""

import torch
from torch import nn

from moe_framework.config.schema import Config
from moe_framework.data.loader import Batch
from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.model.init import local
from moe_framework.precision.policy import precision_policy
from moe_framework.train.build import optimizer_of
from moe_framework.train.model import build_model, choose_backend
from moe_framework.train.step import Objective, agree_on_counts, train_step
from tools.benchmarks.train_step.contender import Contender, Facts, random_tokens


def build_ours(config: Config, mesh: ParallelMesh, device: torch.device, *, seed: int) -> Contender:
    """Build the model and its optimizer as a run does.

    Args:
        config: Validated; its precision mode is the contender's.
        mesh: Of all ranks.
        device: This rank's.
        seed: Of the tokens.

    Returns:
        The contender.

    Raises:
        ConfigError: The device lacks the precision mode, or the backend cannot compute these shapes.
        DependencyError: The backend needs a package that is missing.

    Collective: the world; every rank must call.
    """
    choice = choose_backend(config, device)
    model = build_model(config, mesh, device, choice, draw=draw_on_device)
    optimizer, optim = optimizer_of(config, model), config.optim
    batch = synthetic_batch(config, device, seed=seed, data_rank=mesh.data_rank)
    objective = Objective(config.moe.aux_loss_coeff, config.moe.z_loss_coeff)

    def step() -> float:
        counts = agree_on_counts([batch], mesh.data_group)
        result = train_step(
            model, optimizer, [batch], counts, mesh=mesh, objective=objective, clip_norm=optim.clip_norm
        )
        assert result.applied, "loss or gradient norm are not finite"
        return result.loss

    parallel = config.parallel
    facts = Facts(
        precision=precision_policy(config.precision.mode, device).mode,
        master_weights="fp32",
        clipping=optim.clip_norm > 0,
        optimizer_states="fp32",
        favours="",
        notes=f"FSDP2, dp={parallel.dp} ep={parallel.ep} tp={parallel.tp}, experts by {choice.name}, "
        f"aux loss {config.moe.aux_loss}, compile={config.train.compile}",
    )
    return Contender(step, sum(p.numel() for p in model.parameters()), facts, profiled=model)


@torch.no_grad()
def draw_on_device(model: nn.Module, *, seed: int, init_std: float, num_layers: int) -> None:
    """Draw weights where they are: in moments, but not the same at every layout, as a run's are.

    Args:
        model: Materialised.
        seed: Of this rank.
        init_std: Standard deviation of all but the norms.
        num_layers: Unused; a run draws the projections into the residual stream with less.
    """
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        shard = local(parameter)
        if name.endswith("norm.weight"):
            shard.fill_(1.0)
        else:
            shard.normal_(0.0, init_std)


def synthetic_batch(config: Config, device: torch.device, *, seed: int, data_rank: int) -> Batch:
    """Return the random tokens as a loader's batch: full rows of one document each."""
    tokens, targets = random_tokens(config, device, seed=seed, data_rank=data_rank)
    rows, length = tokens.shape
    return Batch(
        tokens=tokens,
        targets=targets,
        positions=torch.arange(length, device=device).expand(rows, length),
        document_ids=None,
        valid_index=None,
        num_targets=rows * (length - 1),
        num_tokens=rows * length,
        sample_ids=tuple(range(rows)),
    )
