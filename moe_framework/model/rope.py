"""Rotary position embedding, in the half-rotation convention of Hugging Face's Llama and Mixtral.

Source: RoFormer, arXiv:2104.09864, equation 34.
"""

import torch
from torch import Tensor


def rotary_tables(positions_BS: Tensor, *, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles.

    Args:
        positions_BS: [B, S] int64; positions within each document.
        head_dim: Channels of a head, even.
        theta: Base of the frequencies.

    Returns:
        Two tensors [B, 1, S, head_dim] float32.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions_BS.device).float() / head_dim
    angles = positions_BS[:, None, :, None].float() / theta**exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x_BHSd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys.

    Args:
        x_BHSd: [B, H, S, head_dim].
        cos: From `rotary_tables`.
        sin: From `rotary_tables`.

    Returns:
        The same shape and dtype; computed in float32.
    """
    x = x_BHSd.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x_BHSd.dtype)
