"""The learning rate as a pure function of the step, so that resuming needs no state."""

import math


def learning_rate(step: int, *, lr: float, min_lr: float, warmup_steps: int, max_steps: int) -> float:
    """Linear warmup, then a cosine to the minimum.

    Source: SGDR, arXiv:1608.03983, equation 5, without restarts.

    Args:
        step: Optimizer steps already made; 0 for the first step.
        lr: Peak.
        min_lr: Rate of the last step.
        warmup_steps: The peak is reached at this many steps.
        max_steps: Steps of the run.

    Returns:
        The rate for the next step.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    decay_steps = max(max_steps - 1 - warmup_steps, 1)
    progress = min((step - warmup_steps) / decay_steps, 1.0)
    return min_lr + 0.5 * (lr - min_lr) * (1.0 + math.cos(math.pi * progress))
