"""What rounding does to the weights themselves: every one moves by one unit in its last place."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def round_weights(model: nn.Module, seed: int) -> None:
    """Move every weight to the next larger or the next smaller number, at random: no result is surer than that.

    Args:
        model: Whole on this rank.
        seed: Of the directions, which do not depend on the device.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        weights = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert weights.shape == parameter.shape, "another rank's part would move in directions of its own"
        up = torch.randint(0, 2, weights.shape, generator=generator, dtype=torch.bool).to(weights.device)
        weights.copy_(weights.nextafter(torch.where(up, torch.inf, -torch.inf).to(weights.dtype)))
