"""A rank's part of a sharded tensor."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part, or the tensor itself if it is not sharded; gradients flow back into the DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
