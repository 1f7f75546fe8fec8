"""The objects of a run, made from its config. The only place that turns a config into objects."""

from dataclasses import dataclass
from pathlib import Path

import torch

from moe_framework.checkpoint.store import CheckpointStore
from moe_framework.config.schema import Config
from moe_framework.data.fasta import Sequences
from moe_framework.data.loader import TrainLoader, load_rows
from moe_framework.data.packing import Rows
from moe_framework.distributed.collectives import raise_together
from moe_framework.distributed.mesh import ParallelMesh, build_mesh
from moe_framework.distributed.runtime import Runtime
from moe_framework.errors import MoeFrameworkError
from moe_framework.model.decoder import Decoder
from moe_framework.optim.adamw import build_adamw
from moe_framework.train.model import build_model


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
    """

    config: Config
    runtime: Runtime
    mesh: ParallelMesh
    model: Decoder
    optimizer: torch.optim.AdamW
    data: "TrainingData"
    store: CheckpointStore

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


@dataclass(frozen=True)
class TrainingData:
    """The sequences as rows.

    Attributes:
        train: Rows of the region that is trained on.
        heldout: Rows of the region that training never sees.
        sequences: What they were cut from.
    """

    train: Rows
    heldout: Rows
    sequences: Sequences


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
    parallel, optim = config.parallel, config.optim
    assert isinstance(parallel.dp, int), "validate() resolves dp"
    data = _load_data(config)
    mesh = build_mesh(
        runtime.device.type, dp=parallel.dp, ep=parallel.ep, tp=parallel.tp, dp_replicate=parallel.dp_replicate
    )
    model = build_model(config, mesh, runtime.device)
    optimizer = build_adamw(
        model, lr=optim.lr, weight_decay=optim.weight_decay, beta1=optim.beta1, beta2=optim.beta2, eps=optim.eps
    )
    store = CheckpointStore(
        checkpoint_dir(config),
        keep=config.checkpoint.keep,
        async_save=config.checkpoint.async_save,
        group=runtime.checkpoint_group,
    )
    return Training(config, runtime, mesh, model, optimizer, data, store)


def _load_data(config: Config) -> TrainingData:
    data, error = None, None
    try:
        data = TrainingData(
            *load_rows(
                path=config.data.path,
                seq_length=config.data.seq_length,
                stride=config.data.stride,
                heldout_fraction=config.data.heldout_fraction,
            )
        )
    except MoeFrameworkError as caught:
        error = caught
    raise_together(error)
    assert data is not None
    return data
