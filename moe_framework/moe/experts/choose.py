"""Choice of an expert backend by name, or by what the shapes, the dtype and the device allow."""

import torch

from moe_framework.errors import ConfigError
from moe_framework.moe.experts.base import ExpertBackend
from moe_framework.moe.experts.grouped_mm import grouped_mm_experts, unsupported_reason
from moe_framework.moe.experts.loop import loop_experts

BACKENDS: dict[str, ExpertBackend] = {"loop": loop_experts, "grouped_mm": grouped_mm_experts}


def choose_experts(
    name: str, *, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device_type: str
) -> tuple[str, str]:
    """Choose the backend.

    Args:
        name: A key of `BACKENDS`, or `auto`.
        hidden_size: D.
        intermediate_size: F.
        dtype: Compute dtype.
        device_type: `cpu` or `cuda`.

    Returns:
        The backend's name, and the reason for the choice as a sentence for the log.

    Raises:
        ConfigError: The named backend cannot compute these shapes.
    """
    reason = unsupported_reason(
        hidden_size=hidden_size, intermediate_size=intermediate_size, dtype=dtype, device_type=device_type
    )
    if name == "grouped_mm" and reason is not None:
        raise ConfigError(f"experts.backend=grouped_mm cannot be used: {reason}. Set experts.backend=auto.")
    if name != "auto":
        return name, "set in the configuration"
    if reason is not None:
        return "loop", f"grouped_mm cannot be used: {reason}"
    return "grouped_mm", "one kernel for all experts, no host sync"
