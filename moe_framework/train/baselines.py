"""Losses of models that need no training to speak of: what a trained model must beat."""

import math

from moe_framework.data.markov import markov_losses
from moe_framework.data.packing import split_regions
from moe_framework.data.sources import Data


def baselines_of(data: Data, heldout_fraction: float) -> dict[str, float]:
    """Return the losses of simple models on all held-out targets.

    Args:
        data: The rows, and the sequences that they come from.
        heldout_fraction: Share that is held out; 1 for all, which leaves nothing to fit a Markov model on.

    Returns:
        Nats per target by name: of guessing, and where there is one file of nucleotides, of Markov models.
    """
    uniform = {"uniform_loss": math.log(data.alphabet_size)}
    if data.sequences is None or heldout_fraction == 1:
        return uniform
    markov = markov_losses(data.sequences, *split_regions(data.sequences, heldout_fraction))
    return uniform | {
        "markov1_loss": markov[1],
        "markov3_loss": markov[3],
        "markov_best_loss": min(markov.values()),
    }
