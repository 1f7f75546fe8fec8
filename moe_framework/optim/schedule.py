"""The learning rate as a pure function of the step, so that resuming needs no state."""

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant", "wsd"]


def learning_rate(
    step: int,
    *,
    lr: float,
    min_lr: float,
    warmup_steps: int,
    max_steps: int,
    schedule: Schedule,
    decay_steps: int,
) -> float:
    """Linear warmup, then one of four shapes; those that fall have the minimum at the last step, and after it.

    Source: `cosine`: SGDR, arXiv:1608.03983, equation 5, without restarts. `wsd`: MiniCPM, arXiv:2404.06395, section
    4, which leaves the shape of the decay open; here it is linear.

    Args:
        step: Optimizer steps already made; 0 for the first step.
        lr: Peak.
        min_lr: Rate of the last step; `constant` does not use it.
        warmup_steps: The peak is reached at this many steps.
        max_steps: Steps of the run.
        schedule: `cosine` and `linear` fall from the end of the warmup on; `constant` stays at the peak; `wsd` stays
            there until the last `decay_steps` steps.
        decay_steps: Steps below the peak at the end, at least 1; `wsd` only.

    Returns:
        The rate for the next step.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    last = max_steps - 1
    steps_of_decay = decay_steps if schedule == "wsd" else max(last - warmup_steps, 1)
    decayed = step - (last - decay_steps) if schedule == "wsd" else step - warmup_steps
    progress = min(max(decayed, 0) / steps_of_decay, 1.0)
    if schedule == "cosine":
        return min_lr + 0.5 * (lr - min_lr) * (1.0 + math.cos(math.pi * progress))
    # The weights are exactly 0 and 1 at the ends, so that the peak and the minimum are exact.
    return lr * (1.0 - progress) + min_lr * progress
