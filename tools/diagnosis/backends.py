"""What would compute the experts and the attention of a configuration, and whether MXFP8 experts would be fused."""

import warnings
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from moe_framework.config.schema import AUTO, Config
from moe_framework.errors import MoeFrameworkError
from moe_framework.model.attention import KERNELS
from moe_framework.moe.experts.choose import backend_obstacles, choose_experts
from moe_framework.moe.experts.fused_mxfp8 import FUSED, fused_mxfp8_obstacles, fusion_setting
from moe_framework.moe.experts.te import TransformerEngineExperts
from moe_framework.precision.modes import Capability
from moe_framework.precision.policy import PrecisionPolicy, precision_policy
from moe_framework.precision.recipes import RECIPES
from moe_framework.train.model import expert_shape

_PROBED_ROWS = 256
_PROBED_LENGTH = 64


@dataclass(frozen=True)
class ExpertsFinding:
    """The expert backends.

    Attributes:
        chosen: What training would take; None where there is nothing to take.
        reason: Why, or why there is nothing.
        obstacles: By backend, why it cannot compute the layer; None where it can.
    """

    chosen: str | None
    reason: str
    obstacles: dict[str, str | None]


@dataclass(frozen=True)
class AttentionFinding:
    """One kernel of scaled_dot_product_attention.

    Attributes:
        kernel: Its name in torch.
        causal: Why it cannot compute rows of one document; None where it can.
        packed: The same for rows of several documents, which need a mask.
    """

    kernel: str
    causal: str | None
    packed: str | None


@dataclass(frozen=True)
class FusionFinding:
    """Transformer Engine's fused MXFP8 experts.

    Attributes:
        active: Whether they would be used.
        obstacles: Each condition that is not met.
    """

    active: bool
    obstacles: tuple[str, ...]


def examine_experts(config: Config, device: torch.device, *, measure: bool, te_problem: str | None) -> ExpertsFinding:
    """Find the backend that training would choose for the experts.

    Args:
        config: Validated.
        device: A rank's.
        measure: Time the candidates, as training does; else they are named.
        te_problem: Why Transformer Engine does not import; None where it does.

    Returns:
        The finding; an error of the choice is its reason.
    """
    try:
        policy = precision_policy(config.precision.mode, device)
        obstacles = backend_obstacles(expert_shape(config), policy, device)
    except MoeFrameworkError as error:
        return ExpertsFinding(None, str(error), {})
    try:
        choice = choose_experts(config.experts.backend, expert_shape(config), policy, device, measure=measure)
    except MoeFrameworkError as error:
        return ExpertsFinding(None, str(error), obstacles)
    names = choice.name.split(" or ")
    if te_problem is None or "te" not in names:
        return ExpertsFinding(choice.name, choice.reason, obstacles)
    # Training finds a broken installation only when it calls it.
    obstacles["te"] = te_problem
    if names != ["te"] and (policy.te_recipe is None or "scaled_mm" in names):
        others = " or ".join(name for name in names if name != "te")
        return ExpertsFinding(others, f"te cannot be used: {te_problem}", obstacles)
    reason = f"experts.backend={config.experts.backend} in precision.mode={policy.mode}: {te_problem}."
    return ExpertsFinding(None, reason, obstacles)


def examine_attention(config: Config, device: torch.device, policy: PrecisionPolicy) -> tuple[AttentionFinding, ...]:
    """Try each attention kernel alone on short rows of the configuration's heads.

    Args:
        config: Validated.
        device: A rank's.
        policy: Formats.

    Returns:
        The kernels, the one that training prefers first; it takes the first that can compute a row.
    """
    sizes = config.model
    shapes = [(1, heads, _PROBED_LENGTH, sizes.resolved_head_dim) for heads in (sizes.num_heads, sizes.num_kv_heads)]
    q, k = (torch.zeros(shape, device=device, dtype=policy.compute_dtype, requires_grad=True) for shape in shapes)
    mask = torch.ones(1, 1, _PROBED_LENGTH, _PROBED_LENGTH, dtype=torch.bool, device=device).tril()
    return tuple(
        AttentionFinding(kernel.name, _attention_problem(kernel, q, k, None), _attention_problem(kernel, q, k, mask))
        for kernel in KERNELS
    )


def _attention_problem(kernel: SDPBackend, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> str | None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel([kernel]):
                F.scaled_dot_product_attention(
                    q, k, k, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
                )
        except RuntimeError as error:
            reasons = [str(warning.message) for warning in said if "not used because" not in str(warning.message)]
            reason = (reasons or [str(error)])[-1].partition("\n")[0].partition(" (Triggered internally")[0]
            return reason.partition(". ")[0]
    return None


def examine_fusion(
    config: Config, mode: str | None, capability: Capability | None, device: torch.device
) -> FusionFinding:
    """Check every condition of the fused experts, and run them where all are met.

    Args:
        config: Validated.
        mode: What `precision.mode` is here; None where this machine lacks it.
        capability: CUDA compute capability of the device.
        device: A rank's.

    Returns:
        The finding.
    """
    setting = replace(fusion_setting(capability), deterministic=config.train.deterministic)
    sizes = config.model
    obstacles = fused_mxfp8_obstacles(
        hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size, setting=setting
    )
    if mode != "mxfp8":
        is_here = " is not available here" if mode is None else "" if mode == config.precision.mode else f" is {mode}"
        obstacles.insert(0, f"precision.mode={config.precision.mode}{is_here}; only mxfp8 is fused")
    if config.experts.backend not in (AUTO, "te"):
        obstacles.insert(0, f"experts.backend={config.experts.backend}; only te has the fused operation")
    if not obstacles and not _runs_fused(device):
        obstacles.append("every known condition is met, and Transformer Engine did not use it")
    return FusionFinding(not obstacles, tuple(obstacles))


def _runs_fused(device: torch.device) -> bool:
    experts, width = 2, 256
    backend = TransformerEngineExperts(
        num_local_experts=experts,
        hidden_size=width,
        intermediate_size=width,
        recipe=RECIPES["mxfp8"],
        arrangement=FUSED,
    )
    tensors = [torch.zeros(experts, 2 * width, width), torch.zeros(experts, width, width)]
    gate_up, down, rows = (t.to(device, torch.bfloat16) for t in (*tensors, torch.zeros(_PROBED_ROWS, width)))
    counts = torch.full((experts,), _PROBED_ROWS // experts, device=device)
    with torch.no_grad():
        backend(gate_up, down, rows, torch.ones(_PROBED_ROWS, device=device), counts)
    return backend.is_fused()
