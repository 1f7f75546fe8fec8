"""The rules of the learning-rate schedule.

Each function yields the violations it finds, as complete sentences: value, rule, remedy.
"""

from collections.abc import Iterator

from moe_framework.config.rules import is_sound
from moe_framework.config.schema import Config


def schedule_violations(config: Config) -> Iterator[str]:
    """Yield violations of the learning-rate schedule."""
    optim, steps = config.optim, config.train.max_steps
    if optim.lr > 0 and optim.min_lr > optim.lr and optim.schedule != "constant":
        yield f"optim.min_lr={optim.min_lr} must be at most optim.lr={optim.lr}. Lower optim.min_lr or raise optim.lr."
    if optim.warmup_steps > steps >= 1:
        yield (
            f"optim.warmup_steps={optim.warmup_steps} must be at most train.max_steps={steps}, or the learning rate "
            f"never reaches its peak. Set optim.warmup_steps={steps // 10}, or raise train.max_steps."
        )
    elif is_sound(config, "optim.decay_steps", "optim.warmup_steps", "train.max_steps"):
        yield from _decay_violations(config)


def _decay_violations(config: Config) -> Iterator[str]:
    optim, steps = config.optim, config.train.max_steps
    longest = steps - optim.warmup_steps
    if optim.schedule != "wsd":
        if optim.decay_steps:
            yield (
                f"optim.decay_steps={optim.decay_steps} needs optim.schedule=wsd, not {optim.schedule}, which has no "
                "decay of a length of its own. Set optim.schedule=wsd, or leave optim.decay_steps out."
            )
    elif optim.decay_steps == 0 or optim.decay_steps > longest:
        usual = max(min(steps // 10, longest), 1)
        remedy = f"Use 1 to {longest}, such as {usual}" if longest else "Lower optim.warmup_steps"
        yield (
            f"optim.decay_steps={optim.decay_steps} must be at least 1 for optim.schedule=wsd, and at most "
            f"train.max_steps - optim.warmup_steps = {steps} - {optim.warmup_steps} = {longest}. {remedy}."
        )
