"""The experts' function by itself: whether a backend reads the stored weights as gate first, up second."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from moe_framework.model.block import Block
from moe_framework.moe.dispatch.width import WidthDispatcher
from moe_framework.moe.experts.base import scaled_swiglu
from moe_framework.precision.modes import compute_format
from moe_framework.precision.policy import DTYPES
from tools.parity.tensors import compare, swapped, whole
from tools.parity.training import Run

PROBE_ROWS = 32


class GateProbe(NamedTuple):
    """One expert's output against plain torch with the stored weights.

    Attributes:
        stored: Difference with the gate first, as the weights are stored.
        exchanged: Difference with gate and up exchanged.
    """

    stored: float
    exchanged: float


@torch.no_grad()
def probe_gate(run: Run) -> GateProbe:
    """Apply the first block's expert backend to random rows, and compare with plain torch on the stored weights.

    Collective: the experts' mesh; every rank must call.
    """
    block = cast(Block, run.model.layers[0])
    experts, mesh = block.moe.experts, run.mesh
    gate_up, down = whole(experts.gate_up), whole(experts.down)
    num_local = gate_up.shape[0] // mesh.ep.size()
    first = num_local * mesh.ep.get_local_rank()
    gate_up, down = gate_up[first : first + num_local], down[first : first + num_local]
    if isinstance(block.moe.dispatcher, WidthDispatcher):
        width = down.shape[2] // mesh.tp.size()
        part = slice(width * mesh.tp.get_local_rank(), width * (mesh.tp.get_local_rank() + 1))
        gate_up, down = gate_up.unflatten(1, (2, -1))[:, :, part].flatten(1, 2), down[:, :, part]
    generator = torch.Generator().manual_seed(0)
    rows_RD = torch.randn(num_local * PROBE_ROWS, down.shape[1], generator=generator)
    dtype = DTYPES[compute_format(run.config.precision.mode)]
    rows_RD, gate_up, down = rows_RD.to(dtype), gate_up.to(dtype), down.to(dtype)
    probs_R, counts = torch.ones(len(rows_RD)), torch.full((num_local,), PROBE_ROWS)
    device = run.device
    actual = experts.backend(
        gate_up.to(device), down.to(device), rows_RD.to(device), probs_R.to(device), counts.to(device)
    )

    def expected(weights: Tensor) -> Tensor:
        of_experts = rows_RD.float().unflatten(0, (num_local, -1))
        hidden_RF = scaled_swiglu(of_experts.bmm(weights.float().mT).flatten(0, 1), probs_R)
        return hidden_RF.unflatten(0, (num_local, -1)).bmm(down.float().mT).flatten(0, 1)

    result = actual.float().cpu()
    return GateProbe(compare(result, expected(gate_up)).relative, compare(result, expected(swapped(gate_up))).relative)
