"""What a checkpoint of a run holds, and how a run continues from one."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from moe_framework.checkpoint.chunks import stored_shape
from moe_framework.checkpoint.convert.base import TensorSource
from moe_framework.checkpoint.convert.dcp_source import DcpSource, sizes_of_state
from moe_framework.checkpoint.convert.formats import DCP, MEGATRON, detect
from moe_framework.checkpoint.convert.initial import check_shapes, check_sizes, fill_tensors, open_weights
from moe_framework.checkpoint.convert.megatron_source import find_checkpoint
from moe_framework.checkpoint.folder import is_complete, newest_step
from moe_framework.checkpoint.manifest import Manifest, read_manifest
from moe_framework.checkpoint.ranks import Ranks
from moe_framework.checkpoint.staging import dtype_name
from moe_framework.checkpoint.state import (
    allocate_optimizer_state,
    model_tensors,
    optimizer_step,
    optimizer_tensors,
    rng_state,
    set_optimizer_step,
    set_rng_state,
)
from moe_framework.config.load import to_dict
from moe_framework.distributed.collectives import together
from moe_framework.errors import CheckpointError, ConfigError
from moe_framework.train.build import Training, Weighted, checkpoint_dir, named_step
from moe_framework.train.compare import changes, log_changes
from moe_framework.train.identity import INITIAL_ONLY, check_same_run, data_identity

logger = logging.getLogger(__name__)

# A new run may go on with others on purpose, such as a longer context; a converted model's are its own.
_ALTERABLE = ("rope_theta", "norm_eps", "top_k")


class Position(NamedTuple):
    """How far a run is.

    Attributes:
        step: Optimizer steps done, skipped ones included.
        consumed_samples: Rows taken from the data, over all ranks.
    """

    step: int = 0
    consumed_samples: int = 0


class Resumed(NamedTuple):
    """Where a start goes on.

    Attributes:
        position: How far the run is.
        changed: Old and new value of each key that is not as in the checkpoint; empty for a new run.
    """

    position: Position
    changed: dict[str, list[Any]]


class _Weights(NamedTuple):
    """Initial weights, the same for every rank.

    Attributes:
        path: Their folder; of a folder of checkpoints, the newest one.
        has_manifest: Whether it is a step of ours.
        castless: Whether it is one that the store can load, which never casts; a converted step may be in bf16.
        altered: What the model computes otherwise than the run that saved them.
    """

    path: Path
    has_manifest: bool
    castless: bool
    altered: tuple[str, ...] = ()


def save(training: Training, position: Position) -> None:
    """Save model, optimizer, position, random states and config as one step.

    Args:
        training: The run.
        position: Where it is.

    Raises:
        SaveFailedError: This or the previous save failed; on every rank.
        RankError: A rank ended or does not answer.

    Collective: the world; every rank must call.
    """
    config = training.config
    state = {
        "position": position._asdict(),
        "optimizer_step": optimizer_step(training.optimizer),
        "data": data_identity(training),
        "experts_backend": training.experts_backend,
        "layout": dataclasses.asdict(config.parallel) | {"world_size": training.runtime.launch.world_size},
        "config": to_dict(config),
    }
    tensors = model_tensors(training.model) | optimizer_tensors(training.model, training.optimizer)
    training.store.save(position.step, tensors, state, rank_state=rng_state())


def resume(training: Training) -> Resumed:
    """Continue from a checkpoint as `checkpoint.resume` and `checkpoint.init_from` say.

    Args:
        training: The run, freshly built; model and optimizer are filled in place.

    Returns:
        Where to continue; the start, without a checkpoint. What differs from the checkpoint is logged.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or of another model or data; on every rank.
        ConfigError: `checkpoint.resume=never`, and there is something to overwrite; on every rank.

    Collective: the world; every rank must call.
    """
    step_dir = _step_to_resume(training)
    init_from = training.config.checkpoint.init_from
    if step_dir is not None:
        if init_from is not None:
            logger.info("checkpoint.init_from=%s is not read: the run continues from %s", init_from, step_dir)
        return _load(training, step_dir)
    if init_from is not None:
        load_weights(training, Path(init_from))
    return Resumed(Position(), {})


def _step_to_resume(training: Training) -> Path | None:
    config = training.config
    if config.checkpoint.resume not in ("auto", "never"):
        step_dir = named_step(config.checkpoint.resume, training.runtime.checkpoint_group)
        if step_dir != Path(config.checkpoint.resume):
            logger.info(
                "checkpoint.resume=%s: %s is the newest complete step there", config.checkpoint.resume, step_dir.name
            )
        return step_dir
    latest = training.store.latest_step()
    if config.checkpoint.resume == "never" and latest is not None:
        raise ConfigError(
            f"checkpoint.resume=never: {checkpoint_dir(config)} has {latest.name}, which would be overwritten. "
            "Set another run.name or checkpoint.ckpt_dir, or checkpoint.resume=auto."
        )
    return latest


def _load(training: Training, step_dir: Path) -> Resumed:
    together(lambda: _check_has_optimizer(step_dir))
    allocate_optimizer_state(training.optimizer)
    tensors = model_tensors(training.model) | optimizer_tensors(training.model, training.optimizer)
    manifest = training.store.load(step_dir, tensors)
    _check_same_manifest(step_dir, manifest, training)
    state = manifest.state
    try:
        check_same_run(step_dir, state, training)
        position = Position(**state["position"])
        changed = changes(state["config"], training.config)
        set_optimizer_step(training.optimizer, state["optimizer_step"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{step_dir}: manifest.json is not of a training run ({error!r}).") from error
    if len(manifest.rank_states) == training.runtime.launch.world_size:
        set_rng_state(manifest.rank_states[training.runtime.launch.rank])
    logger.info("resumed from %s (saved at %s)", step_dir, _layout(state["layout"]))
    if training.runtime.is_main:
        log_changes(changed, training.config, position.step)
        _log_if_done(step_dir, position, training.config.train.max_steps)
    return Resumed(position, changed)


def _log_if_done(step_dir: Path, position: Position, max_steps: int) -> None:
    """Say that there is nothing to train: the run would end at once, and its reader would wonder why."""
    if position.step >= max_steps:
        logger.warning(
            "train.max_steps=%d: the run is at step %d already, so that it is evaluated and ends. To train on, set "
            "train.max_steps, the steps of the whole run, above %d; or start a new run from these weights with another "
            "run.name and checkpoint.init_from=%s",
            max_steps,
            position.step,
            position.step,
            step_dir,
        )


def _check_has_optimizer(step_dir: Path) -> None:
    if not any(name.startswith("optimizer.") for name in read_manifest(step_dir).tensors):
        raise CheckpointError(
            f"{step_dir}: has weights only, so that no run can go on from it. Start a new one with "
            f"checkpoint.init_from={step_dir}."
        )


def load_weights(training: Weighted, path: Path) -> None:
    """Fill the model from a checkpoint of any format and layout, as `checkpoint.init_from` does.

    Args:
        training: What has the model.
        path: A step folder, a folder of steps, a Hugging Face folder, or a Megatron-Core checkpoint.

    Raises:
        CheckpointError: It is missing, damaged, or of another model; on every rank.

    Collective: the world; every rank must call.
    """
    logger.info("reading the initial weights from %s", path)
    tensors = model_tensors(training.model)
    # Rank 0 decides for all: a run that saves there meanwhile would give each rank another newest step.
    found = Ranks(training.runtime.checkpoint_group).on_first(lambda: _find_weights(path, training, tensors))
    if found.castless:
        manifest = training.store.load(found.path, tensors, allow_extra=lambda name: name.startswith("optimizer."))
        _check_same_manifest(found.path, manifest, training)
    else:
        if found.has_manifest:
            _check_same_manifest(found.path, together(lambda: _check_files(found.path)), training)
        source = together(lambda: _open_weights(found.path, training, tensors))
        together(lambda: fill_tensors(source, _own_names(tensors)))
    logger.info("initial weights from %s", found.path)
    if found.altered and training.runtime.is_main:
        logger.warning("THE MODEL IS NOT THE ONE THAT WAS SAVED: %s", "; ".join(found.altered))


def _find_weights(path: Path, training: Weighted, tensors: Mapping[str, Tensor]) -> _Weights:
    kind = detect(path)
    if kind != DCP:
        return _Weights(find_checkpoint(path) if kind == MEGATRON else path, has_manifest=False, castless=False)
    step_dir = path if is_complete(path) else newest_step(path) or path
    manifest = read_manifest(step_dir)
    sizes, wanted = sizes_of_state(manifest.state, str(step_dir)), _sizes(training)
    may_differ = () if "conversion" in manifest.state else _ALTERABLE
    _check_sizes({key: value for key, value in sizes.items() if key not in may_differ}, training, step_dir)
    altered = [f"model.{key} was {sizes[key]}, now {wanted[key]}" for key in may_differ if sizes[key] != wanted[key]]
    pairs = [(manifest.tensors[name], name, tensor) for name, tensor in tensors.items() if name in manifest.tensors]
    casts = any(
        saved.shape == tuple(stored_shape(name, tensor)) and saved.dtype != dtype_name(tensor.dtype)
        for saved, name, tensor in pairs
    )
    return _Weights(step_dir, has_manifest=True, castless=not casts, altered=tuple(altered))


def _check_files(step_dir: Path) -> Manifest:
    """Compare a step's files with their checksums in its manifest, each rank its share of them."""
    source = DcpSource(step_dir)
    try:
        source.check_files(rank=dist.get_rank(), num_ranks=dist.get_world_size())
        return source.manifest
    finally:
        source.close()


def _check_same_manifest(step_dir: Path, manifest: Manifest, training: Weighted) -> None:
    """Refuse to mix two steps: a rank may read another file system, or the step may be saved again meanwhile."""
    text = json.dumps(dataclasses.asdict(manifest), sort_keys=True)
    digests = Ranks(training.runtime.checkpoint_group).gather(hashlib.sha256(text.encode()).hexdigest())
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise CheckpointError(
            f"{step_dir}: rank {', '.join(others)} read another manifest.json than rank 0. Give every host the same "
            "files, and let no run save this step meanwhile."
        )


def _open_weights(path: Path, training: Weighted, tensors: Mapping[str, Tensor]) -> TensorSource:
    source = open_weights(path, _sizes(training))
    _check_sizes(source.config(), training, path)
    check_shapes(source, _own_names(tensors), str(path))
    return source


def _check_sizes(found: dict[str, Any], training: Weighted, path: Path) -> None:
    wanted = _sizes(training)
    check_sizes(found, wanted, [key for key in wanted if key not in INITIAL_ONLY], str(path))


def _sizes(training: Weighted) -> dict[str, Any]:
    model = training.config.model
    return dataclasses.asdict(model) | {"head_dim": model.resolved_head_dim}


def _own_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _layout(layout: dict[str, Any]) -> str:
    return ", ".join(f"{axis}={layout[axis]}" for axis in ("dp", "ep", "tp"))
