"""Checkpoints that load at any layout, publish atomically, and run nothing when read."""

from moe_framework.checkpoint.manifest import FileEntry, Manifest, TensorEntry, read_manifest
from moe_framework.checkpoint.save import SaveFailedError
from moe_framework.checkpoint.state import (
    allocate_optimizer_state,
    model_tensors,
    optimizer_step,
    optimizer_tensors,
    rng_state,
    set_optimizer_step,
    set_rng_state,
)
from moe_framework.checkpoint.store import CheckpointStore

__all__ = [
    "CheckpointStore",
    "FileEntry",
    "Manifest",
    "SaveFailedError",
    "TensorEntry",
    "allocate_optimizer_state",
    "model_tensors",
    "optimizer_step",
    "optimizer_tensors",
    "read_manifest",
    "rng_state",
    "set_optimizer_step",
    "set_rng_state",
]
