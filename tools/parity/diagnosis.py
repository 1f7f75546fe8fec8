"""From the pattern of what differs to the error that leaves such a pattern."""

from collections.abc import Iterable

from tools.parity.comparison import Findings
from tools.parity.known_faults import KNOWN_FAULTS
from tools.parity.rows import Row, failing, kind_of
from tools.parity.tensors import MOMENTS
from tools.parity.tolerances import Tolerances

EXPERT_KINDS = {"expert gate_up", "expert down"}
# A gradient that is a multiple of the right one leaves this many tolerances of something else.
SLACK = 10.0


def looks_like(findings: Findings, rows: Iterable[Row], tolerances: Tolerances) -> str | None:
    """Name the known fault that explains what differs.

    Args:
        findings: Of one layout.
        rows: Its verdicts.
        tolerances: Of the precision.

    Returns:
        A key of `KNOWN_FAULTS`, or None: nothing differs, or nothing known explains it.
    """
    failed = {(row.quantity, row.tensor) for row in rows if not row.ok}
    if not failed:
        return None
    if _is_swapped(findings, tolerances):
        return "gate_up_swap"
    gradients = failing("gradients", findings, tolerances)
    if gradients:
        return _of_gradients(gradients, findings, failed, tolerances)
    if ("grad_norm", "step 1") in failed:
        return "norm_ep_sum"
    if failing("exp_avg", findings, tolerances) or failing("exp_avg_sq", findings, tolerances):
        return "stale_moment"
    return "replica_drift" if findings.unequal_replicas else None


def explain(name: str, findings: Findings, tolerances: Tolerances) -> str:
    """Return a fault's name with what it means here."""
    text = f"{name}: {KNOWN_FAULTS[name].meaning}"
    if name == "expert_divisor":
        tensors = findings.differences["gradients"]
        factor = tensors[failing("gradients", findings, tolerances)[0]].factor
        text += f" (they are {factor:.4g} times the reference's)"
    if name == "stale_moment":
        moments = {(kind, n): d.relative for kind in MOMENTS for n, d in findings.differences[kind].items()}
        kind, tensor = max(moments, key=lambda key: moments[key])
        text += f" (most in {kind} of {tensor})"
    return text


def _is_swapped(findings: Findings, tolerances: Tolerances) -> bool:
    stored, exchanged = findings.gate
    return (
        any(name.endswith(" swapped") for name in findings.initial)
        or exchanged <= tolerances.of("function", "gate") < stored
    )


def _of_gradients(
    names: list[str], findings: Findings, failed: set[tuple[str, str]], tolerances: Tolerances
) -> str | None:
    tensors = findings.differences["gradients"]
    kinds = {kind_of(name) for name in names}
    if kinds <= EXPERT_KINDS and all(tensors[name].scaled <= SLACK * tolerances.tensor for name in names):
        return "expert_divisor"
    diverged = [name for name in findings.unequal_replicas if kind_of(name.split()[-1]) == "router"]
    if kinds == {"router"} and diverged:
        return "router_tp_sum"
    if _is_only_routers_loss(names, list(tensors)) and ("loss", "step 1") not in failed:
        return "aux_dp"
    return None


def _is_only_routers_loss(names: list[str], all_names: list[str]) -> bool:
    """Whether only what lies before a router differs.

    A router's loss reaches its own weight and everything before it; the last block's experts and the head lie behind
    the last router.
    """
    last_layer = max(int(name.split(".")[1]) for name in all_names if name.startswith("layers."))
    behind = {name for name in names if name.startswith(("norm.", "lm_head.", f"layers.{last_layer}.moe.experts."))}
    return not behind and f"layers.{last_layer}.moe.router.weight" in names
