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
from moe_framework.train.build import Training, checkpoint_dir
from moe_framework.train.compare import changes, log_changes

logger = logging.getLogger(__name__)

# Do not enter the computation of a model that is already initialised.
_INITIAL_ONLY = ("init_std", "max_positions")
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
        "data": _data_identity(training),
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
        _load_weights(training, Path(init_from))
    return Resumed(Position(), {})


def _step_to_resume(training: Training) -> Path | None:
    config = training.config
    if config.checkpoint.resume not in ("auto", "never"):
        # Without a look at the other steps, so that a damaged one can be left out.
        return Path(config.checkpoint.resume)
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
        _check_same_run(step_dir, state, training)
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
    return Resumed(position, changed)


def _check_has_optimizer(step_dir: Path) -> None:
    if not any(name.startswith("optimizer.") for name in read_manifest(step_dir).tensors):
        raise CheckpointError(
            f"{step_dir}: has weights only, so that no run can go on from it. Start a new one with "
            f"checkpoint.init_from={step_dir}."
        )


def _load_weights(training: Training, path: Path) -> None:
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


def _find_weights(path: Path, training: Training, tensors: Mapping[str, Tensor]) -> _Weights:
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


def _check_same_manifest(step_dir: Path, manifest: Manifest, training: Training) -> None:
    """Refuse to mix two steps: a rank may read another file system, or the step may be saved again meanwhile."""
    text = json.dumps(dataclasses.asdict(manifest), sort_keys=True)
    digests = Ranks(training.runtime.checkpoint_group).gather(hashlib.sha256(text.encode()).hexdigest())
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise CheckpointError(
            f"{step_dir}: rank {', '.join(others)} read another manifest.json than rank 0. Give every host the same "
            "files, and let no run save this step meanwhile."
        )


def _open_weights(path: Path, training: Training, tensors: Mapping[str, Tensor]) -> TensorSource:
    source = open_weights(path, _sizes(training))
    _check_sizes(source.config(), training, path)
    check_shapes(source, _own_names(tensors), str(path))
    return source


def _check_sizes(found: dict[str, Any], training: Training, path: Path) -> None:
    wanted = _sizes(training)
    check_sizes(found, wanted, [key for key in wanted if key not in _INITIAL_ONLY], str(path))


def _sizes(training: Training) -> dict[str, Any]:
    model = training.config.model
    return dataclasses.asdict(model) | {"head_dim": model.resolved_head_dim}


def _own_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def _data_identity(training: Training) -> dict[str, Any]:
    """What a position in the data means something for: with any of these changed, it would be other samples."""
    config = training.config
    return {
        "data.path": training.data.fingerprint,
        "data.seq_length": config.data.seq_length,
        "data.stride": config.data.stride,
        "data.heldout_fraction": config.data.heldout_fraction,
        "data.reverse_complement": config.data.reverse_complement,
        "data.separate_documents": config.data.separate_documents,
        "train.seed": config.train.seed,
    }


def _model_identity(model: dict[str, Any]) -> dict[str, Any]:
    """What enters the computation of a model that is already initialised."""
    # Null is a width as well: the same model may be written with it and without.
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_heads"]
    return {
        f"model.{key}": value for key, value in (model | {"head_dim": head_dim}).items() if key not in _INITIAL_ONLY
    }


def _check_same_run(step_dir: Path, state: dict[str, Any], training: Training) -> None:
    """Refuse what the shapes of the tensors cannot show: another number of heads, another order of the data."""
    current = _model_identity(dataclasses.asdict(training.config.model)) | _data_identity(training)
    # Checkpoints of before there were token files lack their key.
    saved = _model_identity(state["config"]["model"]) | {"data.separate_documents": True} | state["data"]
    keys = [key for key, value in current.items() if saved.get(key) != value]
    # Of the data the content is compared, and its name is what a person knows.
    shown = {"data.path": (state["config"]["data"]["path"], training.config.data.path)}
    pairs = {key: shown.get(key, (saved.get(key), current[key])) for key in keys}
    different = [
        f"{key} was {before!r}, now {now!r}" + (", which holds other data" if key in shown else "")
        for key, (before, now) in pairs.items()
    ]
    if different:
        raise CheckpointError(
            f"{step_dir.name}: saved with another configuration: {'; '.join(different)}. Resume with the run's saved "
            "config.yaml, or start a new run from these weights with checkpoint.init_from."
        )


def _layout(layout: dict[str, Any]) -> str:
    return ", ".join(f"{axis}={layout[axis]}" for axis in ("dp", "ep", "tp"))
