"""Training: objects from a config, one step, the loop, evaluation."""
