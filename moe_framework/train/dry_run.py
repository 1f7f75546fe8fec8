"""What a configuration would train, from arithmetic alone: nothing is allocated and torch is not imported."""

from moe_framework.config.schema import Config

# fp32 master weight, two fp32 moments and an fp32 gradient: what is kept of each parameter.
BYTES_PER_PARAMETER = 16
# Of an expert that one rank holds alone, the copy in the compute format from forward to backward: FSDP would free it.
BYTES_OF_COPY = 2


def state_bytes_per_rank(config: Config) -> int:
    """Return the bytes of weights, gradients and optimizer that each rank keeps; activations come on top.

    In the 8-bit modes the experts' copies are quantized, of the same size with their transposes.

    Args:
        config: Validated; dp is resolved.
    """
    parallel = config.parallel
    assert isinstance(parallel.dp, int), "validate() resolves dp"
    dense, experts, _ = _parameters(config)
    # Every parameter is sharded over all ranks of a replica, whatever the degrees.
    ranks_of_replica = parallel.dp // parallel.dp_replicate * parallel.ep * parallel.tp
    sharing = parallel.dp // parallel.dp_replicate * (parallel.tp if parallel.expert_tp == 1 else 1)
    is_copied = sharing == parallel.dp_replicate == 1 and config.precision.mode != "fp32"
    copies = BYTES_OF_COPY * experts if is_copied else 0
    return (BYTES_PER_PARAMETER * (dense + experts) + copies) // ranks_of_replica


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
    model = config.model
    attention = 2 * model.hidden_size * (model.num_heads + model.num_kv_heads) * model.resolved_head_dim
    expert = 3 * model.hidden_size * model.intermediate_size
    router = model.hidden_size * model.num_experts
    norms = 2 * model.hidden_size + (2 * model.resolved_head_dim if model.qk_norm else 0)
    table = model.vocab_size * model.hidden_size
    head = 0 if model.tie_embeddings else table
    dense = model.num_layers * (attention + router + norms) + model.hidden_size + table + head
    experts = model.num_layers * model.num_experts * expert
    active = dense - (table if head else 0) + model.num_layers * model.top_k * expert
    return dense, experts, active
