"""The errors that the check can put into a layout on purpose, and names where a difference looks like one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moe_framework.config.schema import Config
from moe_framework.errors import ConfigError
from tools.parity.layouts import Layout


@dataclass(frozen=True)
class KnownFault:
    """One error.

    Attributes:
        meaning: What is wrong, as the diagnosis says it.
        needs: What a layout must have for the error to be possible.
        possible: Whether a layout and its configuration have that.
    """

    meaning: str
    needs: str
    possible: Callable[[Layout, Config], bool]


def _several_ranks(layout: Layout, _config: Config) -> bool:
    return layout.world_size > 1


def _aux_loss(layout: Layout, config: Config) -> bool:
    return layout.world_size > 1 and config.moe.aux_loss != "none" and config.moe.aux_loss_coeff > 0


KNOWN_FAULTS = {
    "expert_divisor": KnownFault(
        "the experts' gradients are divided by another number of ranks than all others", "2 ranks", _several_ranks
    ),
    "router_tp_sum": KnownFault(
        "the router's gradient is not summed over tp", "parallel.tp > 1", lambda layout, _: layout.tp > 1
    ),
    "norm_ep_sum": KnownFault(
        "the gradient norm is not summed over ep", "parallel.ep > 1", lambda layout, _: layout.ep > 1
    ),
    "aux_dp": KnownFault(
        "the load-balancing loss is divided by the number of ranks", "2 ranks and moe.aux_loss_coeff > 0", _aux_loss
    ),
    "gate_up_swap": KnownFault("gate and up of the experts are exchanged", "any ranks", lambda *_: True),
    "stale_moment": KnownFault("a moment of Adam is not updated", "any ranks", lambda *_: True),
    "replica_drift": KnownFault(
        "copies of a parameter have drifted apart",
        "parallel.dp_replicate > 1",
        lambda layout, _: layout.dp_replicate > 1,
    ),
}


def check_possible(name: str, layouts: Iterable[tuple[Layout, Config]]) -> None:
    """Refuse a fault that a layout cannot have.

    Args:
        name: A key of `KNOWN_FAULTS`.
        layouts: With their configurations.

    Raises:
        ConfigError: For each layout that cannot have it.
    """
    fault = KNOWN_FAULTS[name]
    violations = [
        f"--inject={name} needs {fault.needs}, which {layout} has not. Leave this layout out."
        for layout, config in layouts
        if not fault.possible(layout, config)
    ]
    if violations:
        raise ConfigError(list(dict.fromkeys(violations)))
