"""What each precision mode means for compute, parameters and gradient sums."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrecisionPolicy:
    """The formats of one mode. Master weights, moments, router, softmax and losses are float32 in every mode.

    Attributes:
        compute_dtype: Of activations and of the gathered parameters.
        reduce_dtype: Of gradient sums between ranks.
    """

    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype = torch.float32


POLICIES = {"fp32": PrecisionPolicy(torch.float32), "bf16": PrecisionPolicy(torch.bfloat16)}
