"""What a configuration would train, from arithmetic alone: nothing is allocated and torch is not imported."""

from moe_framework.config.schema import Config
from moe_framework.planning.parameters import (
    BYTES_OF_GRADIENT,
    BYTES_OF_MASTER,
    BYTES_OF_MOMENTS,
    all_parameters,
    local_parameters,
)
from moe_framework.train.memory import job_of

# Weight, two moments and gradient, all fp32: what is kept of each parameter.
BYTES_PER_PARAMETER = BYTES_OF_MASTER + BYTES_OF_MOMENTS + BYTES_OF_GRADIENT


def state_bytes_per_rank(config: Config) -> int:
    """Return the bytes of weights, gradients and optimizer of the rank that keeps the most; the least that it needs.

    Args:
        config: Validated; dp is resolved.
    """
    return BYTES_PER_PARAMETER * local_parameters(job_of(config))


def describe_sizes(config: Config) -> str:
    """Describe the sizes of a validated configuration.

    Args:
        config: Validated; dp is resolved.

    Returns:
        Lines of text: parameters, active parameters, per-rank state in bytes, tokens and micro-steps per step.
    """
    parallel, train = config.parallel, config.train
    assert isinstance(parallel.dp, int), "validate() resolves dp"
    dense, experts, active = _parameters(config)
    ranks = parallel.dp * parallel.ep * parallel.tp
    state = state_bytes_per_rank(config)
    micro_steps = train.global_batch_size // (train.micro_batch_size * parallel.dp * parallel.ep)
    return "\n".join(
        [
            f"ranks: {ranks} (dp={parallel.dp}, ep={parallel.ep}, tp={parallel.tp})",
            f"parameters: {dense + experts:,} ({experts:,} in experts), of which a token uses {active:,}",
            f"weights, gradients and optimizer: {state:,} bytes a rank ({state / 2**30:.2f} GiB)",
            f"a step: {train.global_batch_size} rows, {train.global_batch_size * config.data.seq_length:,} tokens, "
            f"{micro_steps} micro-steps",
        ]
    )


def _parameters(config: Config) -> tuple[int, int, int]:
    """Count the parameters outside and inside experts, and those that one token uses in matrix products."""
    model, job = config.model, job_of(config)
    experts = all_parameters(job, "experts")
    dense = all_parameters(job) - experts
    # Looking up an embedding multiplies nothing; a tied one is the head as well.
    lookup = 0 if model.tie_embeddings else all_parameters(job, "embedding")
    return dense, experts, dense - lookup + experts * model.top_k // model.num_experts
