"""The objects of a run, made from its config; the model is made in `model.py`."""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from moe_framework.checkpoint.folder import newest_step
from moe_framework.checkpoint.manifest import read_manifest
from moe_framework.checkpoint.ranks import Ranks
from moe_framework.checkpoint.store import CheckpointStore
from moe_framework.config.schema import Config
from moe_framework.data.loader import TrainLoader
from moe_framework.data.sources import Cut, Data, open_data
from moe_framework.distributed.collectives import together
from moe_framework.distributed.mesh import ParallelMesh, build_mesh
from moe_framework.distributed.runtime import Runtime
from moe_framework.errors import CheckpointError, DataError
from moe_framework.model.decoder import Decoder
from moe_framework.optim.adamw import AdamW, build_adamw
from moe_framework.train.model import build_model, choose_backend

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """Everything a run trains with.

    Attributes:
        config: Validated.
        runtime: The process group and this rank's device.
        mesh: The mesh.
        model: The parallelised decoder.
        optimizer: Over its parameters.
        data: The rows to train on and to evaluate on.
        store: The checkpoints.
        experts_backend: What computes the experts.
    """

    config: Config
    runtime: Runtime
    mesh: ParallelMesh
    model: Decoder
    optimizer: AdamW
    data: Data
    store: CheckpointStore
    experts_backend: str

    def loader(self, consumed_samples: int) -> TrainLoader:
        """Make this rank's loader, at a position in the data."""
        config = self.config
        return TrainLoader(
            self.data.train,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            data_rank=self.mesh.data_rank,
            num_data_ranks=self.mesh.num_data_ranks,
            seed=config.train.seed,
            reverse_complement=config.data.reverse_complement,
            prefetch=config.data.prefetch,
            consumed_samples=consumed_samples,
        )


class Weighted(Protocol):
    """What weights are loaded into: a `Training`, or something with less than its optimizer and data."""

    @property
    def config(self) -> Config:
        """Validated."""
        ...

    @property
    def runtime(self) -> Runtime:
        """The process group and this rank's device."""
        ...

    @property
    def model(self) -> Decoder:
        """The parallelised decoder."""
        ...

    @property
    def store(self) -> CheckpointStore:
        """Reads the checkpoints of our own format."""
        ...


def checkpoint_dir(config: Config) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(config.checkpoint.ckpt_dir) if config.checkpoint.ckpt_dir else run_dir(config) / "checkpoints"


def run_dir(config: Config) -> Path:
    """Return the folder of a run."""
    return Path(config.run.dir) / config.run.name


def build_training(config: Config, runtime: Runtime) -> Training:
    """Make the objects of a run.

    Args:
        config: Validated.
        runtime: Started.

    Returns:
        Them, with freshly initialised weights.

    Raises:
        DataError: On every rank, if one cannot read the data.
        ConfigError: `experts.backend` cannot be used on this device.

    Collective: the world; every rank must call.
    """
    data = open_same_data(config, cut_of(config))
    _log_data(config, data)
    mesh = mesh_of(config, runtime.device.type)
    store = CheckpointStore(
        checkpoint_dir(config),
        keep=config.checkpoint.keep,
        async_save=config.checkpoint.async_save,
        group=runtime.checkpoint_group,
    )
    preferred = _saved_backend(config, store, runtime.checkpoint_group)
    choice = choose_backend(config, runtime.device, preferred=preferred)
    model = build_model(config, mesh, runtime.device, choice)
    optimizer = optimizer_of(config, model)
    return Training(config, runtime, mesh, model, optimizer, data, store, choice.name)


def mesh_of(config: Config, device_type: str) -> ParallelMesh:
    """Build the mesh of a configuration.

    Args:
        config: Validated.
        device_type: `cpu` or `cuda`.

    Returns:
        The mesh.

    Collective: the world; every rank must call.
    """
    parallel = config.parallel
    assert isinstance(parallel.dp, int), "validate() resolves dp"
    return build_mesh(
        device_type,
        dp=parallel.dp,
        ep=parallel.ep,
        tp=parallel.tp,
        dp_replicate=parallel.dp_replicate,
        expert_tp=parallel.expert_tp,
    )


def optimizer_of(config: Config, model: Decoder) -> AdamW:
    """Make the optimizer of a configuration.

    Args:
        config: Validated.
        model: From `build_model`.

    Returns:
        The optimizer.
    """
    optim = config.optim
    return build_adamw(
        model,
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.eps,
        compiled=config.train.compile,
    )


def named_step(path: str, group: dist.ProcessGroup) -> Path:
    """Return the step that `checkpoint.resume=PATH` means: PATH, or the newest complete step in it.

    Args:
        path: A step, or a folder of steps.
        group: A gloo group of all ranks.

    Returns:
        The step's folder; `path` itself where there is none, for reading it says what is wrong.

    Raises:
        CheckpointError: The newest step in the folder is damaged; on every rank.

    Collective: `group`; every rank must call.
    """

    def find() -> Path:
        folder = Path(path)
        # Nothing is looked at beside a step that is named, so that a damaged one can be left out.
        return (newest_step(folder) if folder.is_dir() else None) or folder

    # Rank 0 decides for all: a run that saves there meanwhile would give each rank another newest step.
    return Ranks(group).on_first(find)


def _saved_backend(config: Config, store: CheckpointStore, group: dist.ProcessGroup) -> str | None:
    """The expert backend of the checkpoint that the run will continue from, if it was in the same precision."""
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    step_dir = store.latest_step() if resume == "auto" else named_step(resume, group)
    if step_dir is None:
        return None
    return backend_of_step(step_dir, config)


def backend_of_step(step_dir: Path, config: Config) -> str | None:
    """Return the expert backend of the run that saved a step, if it computed in the configuration's precision.

    Args:
        step_dir: A step; None is returned for anything else, about which loading it will say what is wrong.
        config: Validated.
    """
    try:
        state = read_manifest(step_dir).state
        return state["experts_backend"] if state["config"]["precision"]["mode"] == config.precision.mode else None
    except (CheckpointError, KeyError, TypeError):
        return None


def cut_of(config: Config) -> Cut:
    """Return how the configuration's data becomes rows."""
    data = config.data
    return Cut(
        seq_length=data.seq_length,
        heldout_fraction=data.heldout_fraction,
        stride=data.stride,
        reverse_complement=data.reverse_complement,
        separate_documents=data.separate_documents,
        vocab_size=config.model.vocab_size,
    )


def open_same_data(config: Config, cut: Cut) -> Data:
    """Open the data, and stop where two hosts have different files: their ranks would shuffle and split other rows.

    Args:
        config: Validated.
        cut: How the data becomes rows.

    Raises:
        ConfigError: A key that this kind of data does not have; on every rank.
        DataError: A rank cannot read the data, or reads other data; on every rank.
        DependencyError: The demo's genome is not installed; on every rank.

    Collective: the world; every rank must call.
    """
    data = together(partial(open_data, config.data.path, cut))
    fingerprints = [""] * dist.get_world_size()
    dist.all_gather_object(fingerprints, data.fingerprint)
    others = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if others:
        raise DataError(
            f"data.path={config.data.path}: rank {', '.join(map(str, others))} read other sequences than rank 0. "
            "Give every host the same files."
        )
    return data


def _log_data(config: Config, data: Data) -> None:
    batch, steps = config.train.global_batch_size, config.train.max_steps
    logger.info(
        "data: %s, %s rows of %d to train on (%.3g epochs in %s steps), %s held out",
        data.train.path,
        f"{len(data.train):,}",
        config.data.seq_length,
        batch * steps / len(data.train),
        f"{steps:,}",
        f"{len(data.heldout):,}",
    )
