"""Made-up findings of a model of two blocks, all equal to the reference, for the tests to change."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from tools.parity.comparison import Findings
from tools.parity.probe import GateProbe
from tools.parity.reference import TENSORS, Reference
from tools.parity.routing import Differences
from tools.parity.tensors import Difference
from tools.parity.tolerances import Tolerances
from tools.parity.training import Figures

TOLERANCES = Tolerances("fp32", "fp32", 2**-24, 2e-7, 1e-5, 1e-5, 1e-5, 1e-5, 1e-3)
EQUAL = Difference(1e-7, 1.0, 1e-7, 0.02)
OFF = Difference(0.1, 0.99, 0.09, 0.02)
NAMES = (
    "embed.weight",
    *(
        f"layers.{layer}.{part}"
        for layer in (0, 1)
        for part in (
            "attention_norm.weight",
            "attention.q_proj.weight",
            "moe_norm.weight",
            "moe.router.weight",
            "moe.experts.gate_up",
            "moe.experts.down",
        )
    ),
    "norm.weight",
    "lm_head.weight",
)


def figures() -> Figures:
    return Figures(
        scalars=[{"loss": 2.0 + step, "aux_loss": 1.0, "z_loss": 0.5, "grad_norm": 3.0} for step in (0, 1)],
        tokens=[(90, 96), (91, 96)],
        loads=[[[24, 24]], [[20, 28]]],
        rows=[{(0, "a"): 1, (1, "b"): 1}, {(2, "c"): 1, (3, "d"): 1}, {(4, "e"): 1, (5, "f"): 1}],
    )


def reference() -> Reference:
    return Reference(Path("unused"), figures(), {}, "loop", 1e-7)


# The name that a plan gives it.
ONE_RANK = replace(reference(), folder=Path("one rank"))


def findings(*off: str, kinds: tuple[str, ...] = ("gradients",), difference: Difference = OFF, **changes) -> Findings:
    """Findings of two ranks in which the tensors named `off` differ, in the given kinds."""
    differences = {
        kind: {name: difference if kind in kinds and name in off else EQUAL for name in NAMES} for kind in TENSORS
    }
    values = {
        "figures": [figures(), deepcopy(figures())],
        "differences": differences,
        "initial": [],
        "routing": Differences(),
        "unequal_replicas": [],
        "num_copies": 0,
        "gate": GateProbe(1e-7, 0.5),
    }
    return Findings(**(values | changes))
