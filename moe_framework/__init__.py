"""Train Mixture-of-Experts foundation models with data, expert and tensor parallelism."""
