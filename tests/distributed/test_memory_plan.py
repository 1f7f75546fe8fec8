"""The planned bytes of a rank, counted on real models that the ranks share, and on a real checkpoint."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_framework.checkpoint import model_tensors, optimizer_tensors
from moe_framework.checkpoint.staging import stage
from moe_framework.distributed.shards import local_part
from moe_framework.optim.adamw import build_adamw
from moe_framework.parallel.activation_checkpointing import KEPT
from moe_framework.planning.activations import kept_activations
from moe_framework.planning.job import Job
from moe_framework.planning.memory import estimate_memory
from moe_framework.planning.moments import moments
from moe_framework.train.memory import job_of
from moe_framework.train.step import accumulate_gradients, agree_on_counts, forward
from tests.distributed.checkpoint_jobs import make_store
from tests.distributed.parity_jobs import OBJECTIVE, OPTIM, Layout, Spec, built, config_of, micro_batches
from tests.helpers.pool import RankPool

LAYOUTS = [Layout(1, 1), Layout(2, 2), Layout(2, 1, tp=2, expert_tp=2)]
MORE_LAYOUTS = [Layout(4, 1, dp_replicate=2), Layout(1, 1, tp=4), Layout(1, 2, tp=2)]
USUAL = Spec(seed=0, changes=(("qk_norm", True), ("intermediate_size", 400)))
TIED = Spec(seed=0, tie_embeddings=True, changes=(("intermediate_size", 400),))
# Names and headers of DCP's files, for each tensor of a rank; of this model in all less than a tenth.
HEADERS_OF_A_TENSOR = 2000


@dataclass
class Counted:
    """Bytes of one rank, and the tensors that it writes."""

    masters: int
    experts: int
    gradients: int
    moments: int
    staged: int
    num_chunks: int


def size_of(tensors) -> int:
    return sum(local_part(tensor).numel() * tensor.element_size() for tensor in tensors)


def count(folder: Path, spec: Spec, layout: Layout) -> Counted:
    """Train a micro-step, count what is kept, and save."""
    model, mesh = built(spec, layout)
    optimizer = build_adamw(model, **OPTIM)
    ranks = {"data_rank": mesh.data_rank, "num_data_ranks": mesh.num_data_ranks}
    batches = micro_batches(spec, 0, accumulation=1, **ranks)
    accumulate_gradients(model, batches, agree_on_counts(batches, mesh.data_group), OBJECTIVE)
    weights = model_tensors(model)
    states = optimizer_tensors(model, optimizer)
    staged = stage(weights | states, copy=True)
    with make_store(folder, async_save=True) as store:
        store.save(1, weights | states, {})
    chunks = [chunk.values for tensor in staged.values() for chunk in tensor.chunks]
    return Counted(
        masters=size_of(weights.values()),
        experts=size_of(tensor for name, tensor in weights.items() if ".experts." in name),
        gradients=size_of(p.grad for p in model.parameters() if p.grad is not None),
        moments=size_of(states.values()),
        staged=sum(values.numel() * values.element_size() for values in chunks),
        num_chunks=len(chunks),
    )


class KeptResults(TorchDispatchMode):
    """Adds up the results of the operators that selective activation checkpointing keeps, each storage once."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return sum(storage.nbytes() for storage in self.storages.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in KEPT["selective"]:
            for result in out if isinstance(out, tuple) else (out,):
                if isinstance(result, torch.Tensor):
                    self.storages[result.untyped_storage().data_ptr()] = result.untyped_storage()
        return out


def kept_bytes(spec: Spec, layout: Layout) -> int:
    """Bytes that one rank's forward pass keeps."""
    model, mesh = built(spec, layout)
    ranks = {"data_rank": mesh.data_rank, "num_data_ranks": mesh.num_data_ranks}
    (batch,) = micro_batches(spec, 0, accumulation=1, **ranks)
    with KeptResults() as kept:
        forward(model, batch)
    return kept.num_bytes


def small_results(job: Job) -> int:
    """What the plan leaves out because it is small, and what is outside of the blocks: logits, the loss, exchanges."""
    tokens, exchanges = job.tokens * job.top_k, 0
    if job.ep > 1:
        exchanges += 4 * tokens + 8 * job.num_experts
    if job.expert_tp > 1:
        exchanges += 4 * job.expert_rows + 8 * job.expert_tp * job.num_experts // job.ep
    rows_by_expert = 2 * 4 * job.micro_batch_size * job.num_experts
    outside = 4 * job.row_tokens * job.vocabulary_part
    if job.tp > 1:
        outside += 4 * (job.row_tokens + job.tokens) * job.hidden_size + 3 * 4 * job.row_tokens
    return job.num_layers * (exchanges + rows_by_expert) + outside


@pytest.mark.parametrize(
    "layout", [Layout(1, 1), Layout(1, 2), Layout(1, 1, tp=2), Layout(1, 2, tp=2, expert_tp=2)], ids=str
)
def test_selective_checkpointing_keeps_what_is_planned(ranks: RankPool, layout: Layout):
    # Whole rows, so that every rank has as many tokens; which experts they go to evens out over the ranks.
    spec = Spec(seed=0, rows=((24,),) * 8, changes=(("vocab_size", 16),))
    counted = ranks.run(kept_bytes, layout.world_size, spec, layout)
    config = config_of(spec, replace(layout, checkpointing="selective"))
    job = replace(job_of(config), micro_batch_size=8 // (layout.dp * layout.ep), seq_length=24)
    block = kept_activations(job, quantized=False) - 4 * job.tokens * job.hidden_size  # the input is no result
    assert sum(counted) == layout.world_size * (job.num_layers * block + small_results(job))


@pytest.mark.parametrize(
    ("spec", "layout"),
    [(USUAL, layout) for layout in LAYOUTS]
    + [pytest.param(USUAL, layout, marks=pytest.mark.slow) for layout in MORE_LAYOUTS]
    + [pytest.param(TIED, Layout(1, 2, tp=2), marks=pytest.mark.slow)],
    ids=str,
)
def test_the_plan_counts_every_byte_of_the_rank_with_the_most(
    ranks: RankPool, tmp_path: Path, spec: Spec, layout: Layout
):
    counted = ranks.run(count, layout.world_size, tmp_path, spec, layout)
    job = job_of(config_of(spec, layout))
    planned, update = estimate_memory(job), list(moments(job))[-1]
    assert max(found.masters for found in counted) == planned.masters
    assert max(found.experts for found in counted) == 4 * planned.expert_parameters
    assert max(found.moments for found in counted) == planned.moments
    assert max(found.gradients for found in counted) == update.gradients
    assert max(found.staged for found in counted) == planned.staged

    on_disk = sum(file.stat().st_size for file in tmp_path.rglob("*.distcp"))
    num_chunks = sum(found.num_chunks for found in counted)
    assert planned.checkpoint < on_disk < planned.checkpoint + HEADERS_OF_A_TENSOR * num_chunks


def test_the_plan_is_of_fp32_masters(ranks: RankPool, tmp_path: Path):
    spec, layout = Spec(seed=0), Layout(1, 2, mode="bf16")
    counted = ranks.run(count, 2, tmp_path, spec, layout)
    assert counted[0].masters == estimate_memory(job_of(config_of(spec, layout))).masters
    assert torch.float32.itemsize * 3 * (counted[0].masters // 4) == counted[0].staged
