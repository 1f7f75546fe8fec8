"""What a run is made of: code, packages, device, layout, configuration."""

import logging
import platform
import subprocess
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from moe_framework import __version__
from moe_framework.config.load import to_dict
from moe_framework.train.build import Training

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "numpy", "transformer-engine", "torchao", "nvidia-resiliency-ext")
_PACKAGE_DIR = Path(__file__).resolve().parents[1]


def facts(training: Training) -> dict[str, Any]:
    """Return what `run.json` says of a run beside its starts; never the environment."""
    config, device = training.config, training.runtime.device
    versions = {"moe_framework": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "git_commit": git_commit(_PACKAGE_DIR),
        "versions": versions,
        "world_size": training.runtime.launch.world_size,
        "layout": asdict(config.parallel),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "experts_backend": training.experts_backend,
        "config": to_dict(config),
    }


def git_commit(package_dir: Path) -> str | None:
    """Return the commit of the code that runs.

    Args:
        package_dir: The package's folder.

    Returns:
        Its hash, with `-dirty` where files of the package differ from it or are not in it; None where the package is
        not part of a repository, also if it lies inside one, as in a virtual environment.
    """
    try:
        _git(package_dir, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(package_dir, "rev-parse", "HEAD")
        return f"{commit}-dirty" if _git(package_dir, "status", "--porcelain", "--", ".") else commit
    except (OSError, subprocess.SubprocessError):
        logger.info("git commit not recorded: not run from a git checkout")
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
