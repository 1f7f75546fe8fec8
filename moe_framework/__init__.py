"""Train Mixture-of-Experts foundation models with data, expert and tensor parallelism."""

__version__ = "0.1.0"
