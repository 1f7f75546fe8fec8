"""A small step on disk, and ways to forge one."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from moe_framework.checkpoint.manifest import _checksum, read_manifest, write_manifest
from moe_framework.checkpoint.store import CheckpointStore
from moe_framework.checkpoint.verify import hash_file


def make_store(directory: Path, *, keep: int = 0, async_save: bool = False) -> CheckpointStore:
    return CheckpointStore(directory, keep=keep, async_save=async_save, group=None)


def example_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.experts": torch.randn(4, 6, 3, generator=generator),
        "model.head": torch.randn(5, 3, generator=generator).to(torch.bfloat16),
        "model.scale": torch.randn((), generator=generator),
        "optimizer.exp_avg.head": torch.randn(5, 3, generator=generator),
    }


def empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}


def save_step(directory: Path, step: int = 200, seed: int = 0) -> Path:
    make_store(directory).save(step, example_tensors(seed), {"samples": 64 * step}, {"rng": "abc"})
    return directory / f"step_{step:08d}"


def rewrite_checksums(step_dir: Path) -> None:
    """What an attacker does after changing files: every checksum in the manifest holds again."""
    manifest = read_manifest(step_dir)
    files = {name: hash_file(step_dir / name) for name in manifest.files}
    write_manifest(step_dir, replace(manifest, files=files))


def edit_manifest(step_dir: Path, **changes: object) -> None:
    """Change fields of a manifest and make its checksum hold again."""
    path = step_dir / "manifest.json"
    body = {**json.loads(path.read_text()), **changes}
    body.pop("checksum")
    path.write_text(json.dumps({**body, "checksum": _checksum(body)}))
