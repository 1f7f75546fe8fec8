"""Checkpoints of whole models at one layout and the other; run by the ranks of the pool."""

from pathlib import Path

import torch
from torch import Tensor, nn

from moe_framework.checkpoint import model_tensors, optimizer_tensors
from moe_framework.optim.adamw import build_adamw
from tests.distributed.checkpoint_jobs import make_store
from tests.distributed.parity_jobs import OPTIM, Layout, Spec, built, put, whole


def tensors_of(spec: Spec, layout: Layout) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor]]:
    """Build a model and its optimizer, and name the tensors of a checkpoint."""
    model, _ = built(spec, layout)
    optimizer = build_adamw(model, **OPTIM)
    return model, optimizer, model_tensors(model) | optimizer_tensors(model, optimizer)


def moments_like(parameter: Tensor) -> dict[str, Tensor]:
    """Return moments that tell every element, and the two moments, apart."""
    return {"exp_avg": parameter * 0.5, "exp_avg_sq": parameter.square()}


@torch.no_grad()
def save_at(directory: Path, spec: Spec, layout: Layout) -> None:
    """Save a fresh model, whose moments are functions of its parameters."""
    model, optimizer, tensors = tensors_of(spec, layout)
    for parameter in model.parameters():
        for key, moment in moments_like(parameter).items():
            optimizer.state[parameter][key].copy_(moment)
    with make_store(directory, async_save=True) as store:
        store.save(1, tensors, {})


@torch.no_grad()
def load_at(directory: Path, spec: Spec, layout: Layout, expected: dict[str, Tensor]) -> list[str]:
    """Load into a model of other values; the names of tensors that are not bit for bit what was saved."""
    _, _, tensors = tensors_of(spec, layout)
    for tensor in tensors.values():
        tensor.fill_(-7.0)
    store = make_store(directory)
    step_dir = store.latest_step()
    assert step_dir is not None
    store.load(step_dir, tensors)
    assert tensors.keys() == expected.keys()
    return [name for name, tensor in tensors.items() if not torch.equal(whole(tensor), expected[name])]


def places_of_values(spec: Spec, layout: Layout) -> list[str]:
    """Write each element's global position into it through DTensor, and compare with where a checkpoint puts it."""
    from moe_framework.checkpoint.chunks import local_chunks, stored_shape

    _, _, tensors = tensors_of(spec, layout)
    wrong = []
    for name, tensor in tensors.items():
        positions = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape)
        put(tensor, positions)
        stored = positions.view(stored_shape(name, tensor))
        for place, values in local_chunks(name, tensor):
            block = stored[tuple(slice(o, o + s) for o, s in zip(place.offsets, place.sizes, strict=True))]
            if not torch.equal(block, values):
                wrong.append(name)
    return wrong
