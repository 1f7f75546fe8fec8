"""Tensor parallelism over the tp axis: heads and vocabulary are shared out, and each row's positions in between.

    where               weight                     before                     after
    embed               rows of the vocabulary     (all tokens)               sum, scatter over the sequence
    attention           -                          gather the sequence        -
      q, k, v_proj      rows: the rank's heads     -                          -
      o_proj            columns: its heads         -                          sum, scatter over the sequence
    lm_head             rows of the vocabulary     gather the sequence        loss over the parts of the vocabulary
    norms, router       whole, for the rank's positions; `fsdp.py` sums their gradients over tp
    experts             whole, for the rank's tokens (expert_tp = 1), or a slice of their width, for the group's

The collectives are in the model (`model.sequence`, `model.vocabulary`); here the weights get their shards. FSDP then
splits each shard over the dense axis.

Source: Megatron-LM, arXiv:1909.08053, section 3; sequence parallelism, arXiv:2205.05198.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moe_framework.distributed.mesh import ParallelMesh
from moe_framework.model.attention import Attention
from moe_framework.model.block import Block
from moe_framework.model.decoder import IGNORE_INDEX, Decoder
from moe_framework.model.sequence import SequenceShard
from moe_framework.model.vocabulary import cross_entropy_share, first_vocabulary_row

ROWS, COLUMNS = Shard(0), Shard(1)
VOCABULARY_TABLE: tuple[tuple[str, Placement], ...] = (("embed", ROWS), ("lm_head", ROWS))
ATTENTION_TABLE: tuple[tuple[str, Placement], ...] = (
    ("q_proj", ROWS),
    ("k_proj", ROWS),
    ("v_proj", ROWS),
    ("o_proj", COLUMNS),
)


def apply_tensor_parallel(model: Decoder, mesh: ParallelMesh) -> None:
    """Shard attention, embedding and head over tp, and the sequence between them; nothing to do where tp = 1.

    Args:
        model: On the meta device; heads and sequence length are divisible by tp.
        mesh: The run's mesh.
    """
    if mesh.tp.size() == 1:
        return
    sequence = SequenceShard(mesh.tp_group)
    model.sequence = sequence
    _shard_by_table(model, VOCABULARY_TABLE, mesh.tp)
    vocab_size = model.embed.num_embeddings
    model.embed.first_row = first_vocabulary_row(vocab_size, mesh.tp_group)
    model.cross_entropy_sum = partial(
        cross_entropy_share, first_row=model.embed.first_row, ignore_index=IGNORE_INDEX, group=mesh.tp_group
    )
    for block in model.layers:
        assert isinstance(block, Block)
        block.attention.sequence = sequence
        table = ATTENTION_TABLE
        if has_whole_kv_heads(block.attention, mesh):
            _use_one_kv_head(block.attention, mesh.tp)
            table = tuple(entry for entry in table if entry[0] not in ("k_proj", "v_proj"))
        _shard_by_table(block.attention, table, mesh.tp)


def has_whole_kv_heads(attention: Attention, mesh: ParallelMesh) -> bool:
    """Return whether there are fewer key and value heads than tp ranks, so that ranks use the same ones."""
    return attention.k_proj.out_features < attention.head_dim * mesh.tp.size()


def _use_one_kv_head(attention: Attention, tp: DeviceMesh) -> None:
    """Let the rank compute only the key and value head that its query heads belong to, of weights that are whole."""
    num_kv_heads = attention.k_proj.out_features // attention.head_dim
    first = tp.get_local_rank() * num_kv_heads // tp.size() * attention.head_dim
    for projection in (attention.k_proj, attention.v_proj):
        projection.rows = slice(first, first + attention.head_dim)


def _shard_by_table(module: nn.Module, table: tuple[tuple[str, Placement], ...], tp: DeviceMesh) -> None:
    for name, placement in table:
        part = getattr(module, name)
        if part is not None:
            part.weight = sharded_parameter(part.weight, tp, (placement,))


def sharded_parameter(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> nn.Parameter:
    """Make a parameter of which each rank has its shard; values are not kept.

    Args:
        whole: On the meta device, in the global shape.
        mesh: The axes to shard over.
        placements: One for each axis.

    Returns:
        The parameter, a DTensor on the meta device.
    """
    shape, _ = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    local = whole.data.new_empty(shape)
    return nn.Parameter(
        DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    )
