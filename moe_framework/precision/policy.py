"""What each precision mode means for compute, parameters, gradient sums and the experts' products."""

from dataclasses import dataclass

import torch

from moe_framework.precision.modes import MODES, resolve_mode
from moe_framework.precision.recipes import RECIPES, TeRecipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class PrecisionPolicy:
    """The formats of one mode. Master weights, moments, router, softmax and losses are float32 in every mode.

    Attributes:
        mode: A key of `modes.MODES`.
        compute_dtype: Of activations and of the gathered parameters.
        reduce_dtype: Of gradient sums between ranks.
        te_recipe: How Transformer Engine quantizes the experts' products; None in modes that it does not have.
    """

    mode: str
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype = torch.float32
    te_recipe: TeRecipe | None = None


def precision_policy(mode: str, device: torch.device) -> PrecisionPolicy:
    """Resolve a mode for a device.

    Args:
        mode: `precision.mode`.
        device: Where the model runs.

    Returns:
        The policy.

    Raises:
        ConfigError: The device does not have the mode.
    """
    on_cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_cuda else None
    where = torch.cuda.get_device_name(device) if on_cuda else "this machine's CPU"
    resolved = resolve_mode(mode, capability, where)
    return PrecisionPolicy(resolved, DTYPES[MODES[resolved].compute], te_recipe=RECIPES.get(resolved))


POLICIES = {"fp32": PrecisionPolicy("fp32", torch.float32), "bf16": PrecisionPolicy("bf16", torch.bfloat16)}
