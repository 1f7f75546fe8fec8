"""The evaluation of a checkpoint: weights alone are loaded, at any layout, and held-out rows are read once."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from moe_framework.checkpoint.convert.formats import detect
from moe_framework.checkpoint.manifest import read_manifest
from moe_framework.checkpoint.ranks import Ranks
from moe_framework.checkpoint.store import CheckpointStore
from moe_framework.config.schema import Config
from moe_framework.data.blend import BlendedRows
from moe_framework.data.loader import Batch, batches_of, spread_rows
from moe_framework.data.rows import RowSource
from moe_framework.data.sources import Data
from moe_framework.distributed.collectives import all_reduce_sum, raise_together
from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.distributed.runtime import Runtime
from moe_framework.errors import CheckpointError, DataError
from moe_framework.model.decoder import Decoder
from moe_framework.parallel.apply import apply_parallel
from moe_framework.precision.policy import precision_policy
from moe_framework.train.accuracy import AccuracyCounter
from moe_framework.train.baselines import baselines_of
from moe_framework.train.build import backend_of_step, cut_of, mesh_of, named_step, open_same_data
from moe_framework.train.evaluate import Measured, measure
from moe_framework.train.model import choose_backend, meta_decoder
from moe_framework.train.persist import load_weights

logger = logging.getLogger(__name__)

Split = Literal["heldout", "all"]


@dataclass(frozen=True)
class Loaded:
    """A model with a checkpoint's weights, without optimizer.

    Attributes:
        config: Validated.
        runtime: The process group and this rank's device.
        mesh: The mesh.
        model: The parallelised decoder.
        store: Reads checkpoints.
        experts_backend: What computes the experts.
    """

    config: Config
    runtime: Runtime
    mesh: ParallelMesh
    model: Decoder
    store: CheckpointStore
    experts_backend: str


class Source(NamedTuple):
    """What was measured on one data set.

    Attributes:
        path: The data set.
        num_rows: Its rows that were read.
        measured: Sums over them.
        num_correct: Targets that were the most likely token.
    """

    path: str
    num_rows: int
    measured: Measured
    num_correct: int


class Evaluation(NamedTuple):
    """What was measured, the same on every rank but for the baselines, which are rank 0's.

    Attributes:
        checkpoint: Its folder; of a folder of steps, the newest one.
        sources: One for each data set of `data.path`.
        baselines: Losses of simple models on all held-out targets, nats per target by name.
        experts_backend: What computed the experts.
        seconds: How long reading the rows and computing took.
    """

    checkpoint: Path
    sources: tuple[Source, ...]
    baselines: dict[str, float]
    experts_backend: str
    seconds: float


# Told on every rank: batches done, batches of all, and tokens of this rank in the last one.
Heard = Callable[[int, int, int], None]


def evaluate_checkpoint(config: Config, runtime: Runtime, *, split: Split, hear: Heard) -> Evaluation:
    """Load the weights of `checkpoint.init_from` and measure them on the data.

    Args:
        config: Validated; `eval.max_rows` limits the rows, 0 for all.
        runtime: Started.
        split: The held-out rows, or every row of the data.
        hear: Hears of each batch.

    Returns:
        What was measured.

    Raises:
        MoeFrameworkError: The checkpoint, the data, the device or a package is not as it must be; on every rank.

    Collective: the world; every rank must call.
    """
    assert config.checkpoint.init_from is not None, "there is a checkpoint to evaluate"
    named, group = Path(config.checkpoint.init_from), runtime.checkpoint_group
    # Before the data, which may take long to read.
    Ranks(group).on_first(lambda: detect(named))
    step_dir = named_step(str(named), group)
    cut = replace(cut_of(config), whole=split == "all")
    data = open_same_data(config, cut)
    loaded = _load(config, runtime, step_dir)
    if runtime.is_main:
        _warn_of_rows_trained_on(step_dir, config, data, split)
    started = time.perf_counter()
    sources = _measure(loaded, data.heldout, hear)
    if not sum(source.measured.num_targets for source in sources):
        raise DataError(
            f"eval.max_rows={config.eval.max_rows}: the chosen rows of {data.heldout.path} have nothing to predict. "
            "Raise it, or set 0 for all rows."
        )
    seconds = time.perf_counter() - started
    baselines = baselines_of(data, cut.share) if runtime.is_main else {}
    return Evaluation(step_dir, sources, baselines, loaded.experts_backend, seconds)


def _load(config: Config, runtime: Runtime, step_dir: Path) -> Loaded:
    mesh = mesh_of(config, runtime.device.type)
    choice = choose_backend(config, runtime.device, preferred=backend_of_step(step_dir, config))
    policy = precision_policy(config.precision.mode, runtime.device)
    logger.info("precision.mode: %s", policy.mode)
    logger.info("experts.backend: %s (%s)", choice.name, choice.reason)
    model = meta_decoder(config, mesh, policy, choice)
    # Not drawn: loading fills every parameter, or fails.
    apply_parallel(model, mesh, device=runtime.device, precision=policy, compile_model=config.train.compile)
    store = CheckpointStore(step_dir.parent, keep=0, async_save=False, group=runtime.checkpoint_group)
    loaded = Loaded(config, runtime, mesh, model, store, choice.name)
    load_weights(loaded, step_dir)
    return loaded


def _measure(loaded: Loaded, rows: RowSource, hear: Heard) -> tuple[Source, ...]:
    config, mesh, device = loaded.config, loaded.mesh, loaded.runtime.device
    micro_batch_size = config.train.micro_batch_size
    chosen = list(_chosen_by_part(rows, config.eval.max_rows))
    rows_per_batch = micro_batch_size * mesh.num_data_ranks
    total = sum(-(-len(numbers) // rows_per_batch) for _, numbers in chosen)
    done = 0

    def heard(batches: Iterator[Batch]) -> Iterator[Batch]:
        nonlocal done
        for batch in _failing_together(batches, mesh.world_group):
            yield batch
            done += 1
            hear(done, total, batch.num_tokens)

    sources = []
    with AccuracyCounter(loaded.model, mesh, device) as counter:
        for part, numbers in chosen:
            batches = batches_of(
                part,
                numbers,
                micro_batch_size=micro_batch_size,
                data_rank=mesh.data_rank,
                num_data_ranks=mesh.num_data_ranks,
            )
            measured = measure(loaded.model, heard(batches), mesh=mesh, device=device)
            sources.append(Source(part.path, len(numbers), measured, counter.take()))
    return tuple(sources)


def _chosen_by_part(rows: RowSource, max_rows: int) -> Iterator[tuple[RowSource, np.ndarray]]:
    """Yield each data set with the numbers of its rows among those that training's evaluation would use."""
    chosen, first = spread_rows(len(rows), max_rows), 0
    for part in rows.parts if isinstance(rows, BlendedRows) else (rows,):
        stop = first + len(part)
        yield part, chosen[(chosen >= first) & (chosen < stop)] - first
        first = stop


def _failing_together(batches: Iterator[Batch], group: dist.ProcessGroup) -> Iterator[Batch]:
    """Yield batches; if one rank cannot read its own, every rank says so instead of waiting for it in the model."""
    while True:
        batch, error = None, None
        try:
            batch = next(batches, None)
        except Exception as caught:
            error = caught
        # A host tensor, so that no GPU waits for it.
        if all_reduce_sum(torch.tensor(int(error is not None)), group).item():
            raise_together(error, group)
        if batch is None:
            return
        yield batch


def _warn_of_rows_trained_on(step_dir: Path, config: Config, data: Data, split: Split) -> None:
    with contextlib.suppress(CheckpointError, KeyError, TypeError):
        saved = read_manifest(step_dir).state["data"]
        if saved["data.path"] != data.fingerprint:
            return
        if split == "all":
            logger.warning("--split all: THE CHECKPOINT WAS TRAINED ON A PART OF THESE ROWS")
        elif config.data.heldout_fraction > saved["data.heldout_fraction"]:
            logger.warning(
                "data.heldout_fraction=%s: THE CHECKPOINT WAS TRAINED ON A PART OF THESE ROWS; it was %s then",
                config.data.heldout_fraction,
                saved["data.heldout_fraction"],
            )
