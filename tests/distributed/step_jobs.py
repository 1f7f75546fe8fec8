"""What the ranks of the step, evaluation, layout and checkpointing tests run."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_framework.distributed.mesh import build_mesh
from moe_framework.errors import DataError
from moe_framework.optim.adamw import build_adamw
from moe_framework.train.evaluate import measure
from moe_framework.train.step import accumulate_gradients, agree_on_counts, train_step
from tests.distributed.parity_jobs import CLIP_NORM, OBJECTIVE, OPTIM, Layout, Spec, built, micro_batches, parameters_of


def step_with_a_bad_weight(spec: Spec, layout: Layout, bad_rank: int) -> tuple[bool, bool, float]:
    """One step after a weight on one rank became NaN; whether it was applied, whether anything moved, its loss."""
    model, mesh = built(spec, layout)
    optimizer = build_adamw(model, **OPTIM)
    if dist.get_rank() == bad_rank:
        down: Any = dict(model.named_parameters())["layers.0.moe.experts.down"]
        with torch.no_grad():
            down.to_local().fill_(float("nan"))
    before = parameters_of(model)
    batches = micro_batches(spec, 0, data_rank=mesh.data_rank, num_data_ranks=mesh.num_data_ranks, accumulation=1)
    counts = agree_on_counts(batches, mesh.data_group)
    result = train_step(model, optimizer, batches, counts, mesh=mesh, objective=OBJECTIVE, clip_norm=CLIP_NORM)
    after = parameters_of(model)
    moved = not all(torch.equal(before[name], after[name]) for name in before if "experts.down" not in name)
    return result.applied, moved, result.loss


def counts_when_one_loader_failed(spec: Spec, failed_rank: int | None, *, tp: int = 1) -> tuple[int, int]:
    """The agreed counts, or the failed loader's error."""
    mesh = build_mesh("cpu", dp=dist.get_world_size() // tp, ep=1, tp=tp)
    batches: Any = micro_batches(spec, 0, data_rank=mesh.data_rank, num_data_ranks=mesh.num_data_ranks, accumulation=2)
    if dist.get_rank() == failed_rank:
        batches = DataError("data.path=/x.fa: ended early.")
    counts = agree_on_counts(batches, mesh.world_group, copies=mesh.tp.size())
    return counts.num_targets, counts.num_tokens


def heldout_loss(spec: Spec, layout: Layout) -> tuple[float, bool]:
    """The loss of one global batch before training, and whether evaluation left gradients behind."""
    model, mesh = built(spec, layout)
    batches = micro_batches(
        spec,
        0,
        data_rank=mesh.data_rank,
        num_data_ranks=mesh.num_data_ranks,
        accumulation=layout.accumulation,
    )
    loss = measure(model, batches, mesh=mesh, device=torch.device("cpu")).loss
    return loss, any(p.grad is not None for p in model.parameters())


def shard_shapes(spec: Spec, layout: Layout) -> dict[str, tuple[int, ...]]:
    """The shape of this rank's part of each parameter."""
    model, _ = built(spec, layout)
    shapes = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        shapes[name] = tuple(parameter.to_local().shape)
    return shapes


class CountedOps(TorchDispatchMode):
    """Counts the operators that really run; results that checkpointing kept are not among them."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def ops_of_a_step(spec: Spec, layout: Layout) -> Counter[str]:
    """Operators of one forward and backward pass on this rank."""
    model, mesh = built(spec, layout)
    (batch,) = micro_batches(spec, 0, data_rank=mesh.data_rank, num_data_ranks=mesh.num_data_ranks, accumulation=1)
    with CountedOps() as ops:
        out = model(
            batch.tokens,
            batch.positions,
            batch.targets,
            document_ids_BS=batch.document_ids,
            valid_index_T=batch.valid_index,
        )
        (out.loss + out.aux_loss + out.z_loss).backward()
    return ops.counts


def all_reduces_of_gradients(spec: Spec, layout: Layout) -> int:
    """All-reduces of the forward and backward passes of one step on this rank."""
    model, mesh = built(spec, layout)
    batches = micro_batches(
        spec, 0, data_rank=mesh.data_rank, num_data_ranks=mesh.num_data_ranks, accumulation=layout.accumulation
    )
    counts = agree_on_counts(batches, mesh.data_group)
    with CountedOps() as ops:
        accumulate_gradients(model, batches, counts, OBJECTIVE)
    return ops.counts["c10d.allreduce_.default"]


def router_weight_seen(spec: Spec, layout: Layout) -> bool:
    """Whether a bf16 model's router computes with exactly its fp32 master."""
    model, mesh = built(spec, layout)
    router: Any = model.layers[0].moe.router  # pyright: ignore
    master = router.weight.full_tensor()
    seen = []
    router.register_forward_pre_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    batches = micro_batches(spec, 0, data_rank=mesh.data_rank, num_data_ranks=mesh.num_data_ranks, accumulation=1)
    measure(model, batches, mesh=mesh, device=torch.device("cpu"))
    assert not torch.equal(master, master.bfloat16().float()), "the weights would not show a rounding"
    return seen[0].dtype == torch.float32 and torch.equal(seen[0], master)


def num_compiled_graphs() -> int:
    """How many graphs this process has compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
