"""What must stay as it was when a run goes on from a checkpoint: the model's computation, and the order of the data."""

import dataclasses
from pathlib import Path
from typing import Any

from moe_framework.errors import CheckpointError
from moe_framework.train.build import Training

# Do not enter the computation of a model that is already initialised.
INITIAL_ONLY = ("init_std", "max_positions")


def data_identity(training: Training) -> dict[str, Any]:
    """Return what a position in the data means something for: with any of these changed, it would be other samples."""
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
    return {f"model.{key}": value for key, value in (model | {"head_dim": head_dim}).items() if key not in INITIAL_ONLY}


def check_same_run(step_dir: Path, state: dict[str, Any], training: Training) -> None:
    """Refuse what the shapes of the tensors cannot show: another number of heads, another order of the data.

    Args:
        step_dir: The step.
        state: Of its manifest.
        training: The run that would go on from it.

    Raises:
        CheckpointError: Another model or other data; every difference is named.
        KeyError: The state is not of a training run.
    """
    current = _model_identity(dataclasses.asdict(training.config.model)) | data_identity(training)
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
