"""The parameters of a rank, tensor by tensor, as tensor and expert parallelism and FSDP share them out."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Literal, NamedTuple

from moe_framework.planning.job import Job

BYTES_OF_MASTER = 4
BYTES_OF_MOMENTS = 8
BYTES_OF_GRADIENT = 4
# What a checkpoint stores of a parameter: the fp32 master and two fp32 moments.
BYTES_SAVED = BYTES_OF_MASTER + BYTES_OF_MOMENTS

Part = Literal["block", "experts", "embedding", "head"]


class Piece(NamedTuple):
    """One parameter tensor, or several alike.

    Attributes:
        part: Where it belongs: `block` (attention, norms, router), `experts`, `embedding`, or `head` (and last norm).
        shape: What FSDP shards: the rank's part after tensor and expert parallelism.
        shards: Ranks that FSDP shards it over.
        dim: The dim that is sharded; the rank with the most has ceil(shape[dim] / shards) of it.
        times: How many of them the model has.
    """

    part: Part
    shape: tuple[int, ...]
    shards: int
    dim: int
    times: int = 1

    @property
    def gathered(self) -> int:
        """Numbers that the rank has of all of them where FSDP has gathered them."""
        return self.times * prod(self.shape)

    @property
    def local(self) -> int:
        """Numbers that the rank with the most keeps."""
        size = self.shape[self.dim]
        return self.gathered // size * -(-size // self.shards)


def pieces(job: Job) -> Iterator[Piece]:
    """Yield the rank's parameters.

        what                        tp and ep leave                FSDP shards over
        q, k, v, o projections      1/tp of the heads              dp_shard·ep
        k, v where KV heads < tp    all                            dp_shard·ep·tp
        norms, router               all                            dp_shard·ep·tp
        embedding, head             ceil(V/tp) rows                dp_shard·ep
        experts                     E/ep of them, F/expert_tp      dp_shard·tp, or dp_shard if expert_tp = tp

    dp_replicate divides nothing: each replica has all of it.

    Args:
        job: The run.
    """
    width, heads = job.hidden_size, job.num_heads * job.head_dim // job.tp
    dense, everyone = job.dp_shard * job.ep, job.dp_shard * job.ep * job.tp
    layers, norms = job.num_layers, 2 * job.num_layers
    yield Piece("block", (width,), everyone, 0, norms)
    yield Piece("block", (heads, width), dense, 0, layers)
    yield Piece("block", (width, heads), dense, 0, layers)
    kv_width = job.num_kv_heads * job.head_dim
    if job.num_kv_heads < job.tp:
        yield Piece("block", (kv_width, width), everyone, 0, 2 * layers)
    else:
        yield Piece("block", (kv_width // job.tp, width), dense, 0, 2 * layers)
    if job.qk_norm:
        yield Piece("block", (job.head_dim,), everyone, 0, norms)
    yield Piece("block", (job.num_experts, width), everyone, 0, layers)

    experts, slice_width = job.num_experts // job.ep, job.expert_width
    if job.expert_tp == 1:
        yield Piece("experts", (experts, 2 * slice_width, width), job.expert_shards, 1, layers)
    else:
        yield Piece("experts", (experts, 2, slice_width, width), job.expert_shards, 2, layers)
    yield Piece("experts", (experts, width, slice_width), job.expert_shards, 1, layers)

    # A vocabulary that tp does not divide is sharded in the other dim.
    dim = 1 if job.vocab_size % job.tp else 0
    table = (job.vocabulary_part, width)
    yield Piece("embedding", table, dense, dim)
    yield Piece("head", (width,), everyone, 0)
    if not job.tie_embeddings:
        yield Piece("head", table, dense, dim)


def local_parameters(job: Job, *parts: Part) -> int:
    """Count the parameters that the rank with the most keeps between steps.

    Args:
        job: The run.
        parts: Which; all where none is given.
    """
    return sum(piece.local for piece in pieces(job) if not parts or piece.part in parts)


def gathered_parameters(job: Job, part: Part) -> int:
    """Count the parameters of a part of the model that the rank computes with: of all layers."""
    return sum(piece.gathered for piece in pieces(job) if piece.part == part)


def all_parameters(job: Job, *parts: Part) -> int:
    """Count the parameters of the whole model, or of parts of it, which no layout changes."""
    return local_parameters(replace(job, dp_shard=1, dp_replicate=1, ep=1, tp=1, expert_tp=1), *parts)


def checkpoint_bytes(job: Job) -> int:
    """Return the size of a checkpoint on disk: 12 bytes a parameter, once, whatever the layout.

    DCP's headers come on top: about 1.6 kB for each tensor of a rank.
    """
    return BYTES_SAVED * all_parameters(job)


def staged_bytes(job: Job) -> int:
    """Return the host memory that an asynchronous save holds on the rank with the most: a copy of all it keeps.

    On a GPU it is pinned, and torch keeps it for the next save; its allocator may round each tensor's size up.
    """
    return BYTES_SAVED * local_parameters(job)
