"""Named tensors of a layout's ranks: gathered whole, compared with the reference's, and compared between replicas."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

MOMENTS = ("exp_avg", "exp_avg_sq")
STACKED_GATE_UP = ".moe.experts.gate_up"


class Difference(NamedTuple):
    """One tensor of a layout against the reference's.

    Attributes:
        relative: ‖a − b‖/‖b‖; ‖a‖ where b is zero; infinite where a has a number that is not finite.
        factor: The f for which f·b is nearest to a; 1 where b is zero.
        scaled: ‖a − f·b‖/‖a‖: what a factor does not explain.
        rms: Root mean square of b.
        norm: ‖b‖.
    """

    relative: float
    factor: float
    scaled: float
    rms: float
    norm: float = 0.0


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters by the names of the unsharded model."""
    # state_dict makes FSDP put its sharded parameters back, whatever ran last.
    model.state_dict(keep_vars=True)
    yield from model.named_parameters()


def moments(model: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> Iterator[tuple[str, Tensor]]:
    """Yield one of Adam's moments by parameter name; zeros where no step was made."""
    for name, parameter in named_parameters(model):
        state = optimizer.state.get(parameter, {})
        yield name, state[key] if key in state else torch.zeros_like(parameter)


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor in the shape of the unsharded model.

    Args:
        tensor: A rank's; [E, 2, F, D] of experts whose width is shared becomes [E, 2F, D].

    Returns:
        float32 on the CPU.

    Collective: the tensor's mesh, if it is a DTensor; every rank must call.
    """
    tensor = tensor.detach()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    full = full.float().cpu()
    return full.flatten(1, 2) if full.dim() == 4 else full


def compare(actual: Tensor, expected: Tensor) -> Difference:
    """Compare two whole tensors in float64."""
    if actual.shape != expected.shape:
        return Difference(math.inf, 1.0, math.inf, 0.0)
    a, b = actual.double().flatten(), expected.double().flatten()
    if not a.isfinite().all():
        return Difference(math.inf, 1.0, math.inf, 0.0)
    norm_a, norm_b = a.norm().item(), b.norm().item()
    factor = (a @ b).item() / norm_b**2 if norm_b else 1.0
    scaled = (a - factor * b).norm().item() / (norm_a or 1.0)
    rms = norm_b / math.sqrt(max(b.numel(), 1))
    return Difference((a - b).norm().item() / (norm_b or 1.0), factor, scaled, rms, norm_b)


def together(differences: Iterable[Difference]) -> float:
    """Return ‖a − b‖/‖b‖ of all tensors as one; 0 where b is zero."""
    far, norms = zip(*((d.relative * d.norm, d.norm) for d in differences), strict=True)
    return math.hypot(*far) / (math.hypot(*norms) or 1.0)


def compare_all(tensors: Iterator[tuple[str, Tensor]], expected: Mapping[str, Tensor]) -> dict[str, Difference]:
    """Gather tensors one after the other and compare each.

    Args:
        tensors: The same names on every rank, in the same order.
        expected: The reference's; read on rank 0 alone.

    Returns:
        By name, in the model's order; empty on the other ranks. Names that only one side has differ infinitely.

    Collective: the tensors' meshes; every rank must call.
    """
    found: dict[str, Difference] = {}
    for name, tensor in tensors:
        gathered = whole(tensor)
        if dist.get_rank() == 0:
            other = expected.get(name)
            found[name] = Difference(math.inf, 1.0, math.inf, 0.0) if other is None else compare(gathered, other)
    if dist.get_rank() == 0:
        found |= {name: Difference(math.inf, 1.0, math.inf, 0.0) for name in expected if name not in found}
    return found


def digests(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
    """Digest each whole tensor; of the experts' gate and up also their exchange, as `NAME swapped`.

    Collective: the tensors' meshes; every rank must call.
    """
    found = {}
    for name, tensor in tensors:
        full = whole(tensor)
        found[name] = _digest(full)
        if name.endswith(STACKED_GATE_UP):
            found[f"{name} swapped"] = _digest(swapped(full))
    return found


def swapped(gate_up: Tensor) -> Tensor:
    """Exchange the gate and up halves of [..., 2F, D]."""
    return torch.cat(gate_up.chunk(2, dim=-2)[::-1], dim=-2)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def replica_digests(tensors: Iterator[tuple[str, Tensor]]) -> dict[tuple, str]:
    """Digest this rank's part of each tensor, by the name and the part.

    A part is known by the coordinates on the axes that split it: ranks that differ elsewhere hold copies.
    """
    found = {}
    for name, tensor in tensors:
        part: tuple = ()
        local = tensor.detach()
        if isinstance(local, DTensor):
            coordinates = local.device_mesh.get_coordinate()
            assert coordinates is not None, "every rank is in every mesh of its parameters"
            part = tuple(
                (str(placement), coordinate)
                for placement, coordinate in zip(local.placements, coordinates, strict=True)
                if not placement.is_replicate()
            )
            local = local.to_local()
        found[name, part] = _digest(local)
    return found


def unequal_replicas(of_ranks: list[dict[tuple, str]]) -> tuple[list[str], int]:
    """Find the names of which two ranks hold different copies of one part.

    Args:
        of_ranks: From `replica_digests`, of every rank.

    Returns:
        The names, in order, and how many copies were compared with another.
    """
    first: dict[tuple, str] = {}
    names, copies = [], 0
    for digests_of_rank in of_ranks:
        for key, digest in digests_of_rank.items():
            copies += key in first
            if first.setdefault(key, digest) != digest:
                names.append(key[0])
    return list(dict.fromkeys(names)), copies
