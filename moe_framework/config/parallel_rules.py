"""The rules of the parallel degrees, between themselves and with the model's sizes.

Each function yields the violations it finds, as complete sentences: value, rule, remedy.
"""

from collections.abc import Iterator
from math import gcd

from moe_framework.config.rules import divisors, either, is_sound, near, near_multiples
from moe_framework.config.schema import AUTO, Config

DEGREES = ("parallel.dp", "parallel.ep", "parallel.tp")


def degree_violations(config: Config, world_size: int, dp: int | None) -> Iterator[str]:
    """Yield violations of the degrees: against the world, the experts, and each other.

    Args:
        config: The configuration.
        world_size: Number of ranks.
        dp: `parallel.dp` as a number, or None where the degrees do not fit the world.
    """
    parallel, num_experts = config.parallel, config.model.num_experts
    if is_sound(config, *DEGREES) and dp is None:
        yield _world_violation(config, world_size)
    if parallel.ep >= 1 and num_experts >= 1 and num_experts % parallel.ep:
        yield (
            f"parallel.ep={parallel.ep} must divide model.num_experts={num_experts}. "
            f"Use {either(divisors(num_experts))}."
        )
    if dp is not None and parallel.dp_replicate >= 1 and dp % parallel.dp_replicate:
        yield (
            f"parallel.dp_replicate={parallel.dp_replicate} must divide parallel.dp={_dp(config, dp, world_size)}. "
            f"Use {either(divisors(dp))}."
        )
    if parallel.tp >= 1 and parallel.expert_tp > 1 and parallel.expert_tp != parallel.tp:
        allowed = either(sorted({1, parallel.tp}))
        yield f"parallel.expert_tp={parallel.expert_tp} must be 1 or parallel.tp={parallel.tp}. Use {allowed}."


def tensor_violations(config: Config) -> Iterator[str]:
    """Yield violations of what tp splits: heads, positions, vocabulary, and the width of the experts."""
    tp, expert_tp, model, length = config.parallel.tp, config.parallel.expert_tp, config.model, config.data.seq_length
    heads, kv_heads, width = model.num_heads, model.num_kv_heads, model.intermediate_size
    if tp < 1:
        return
    if heads >= 1 and heads % tp:
        yield f"parallel.tp={tp} must divide model.num_heads={heads}. Use {either(divisors(heads))}."
    elif heads >= 1 and kv_heads >= 1 and heads % kv_heads == 0 and kv_heads % tp and tp % kv_heads:
        allowed = [degree for degree in divisors(heads) if kv_heads % degree == 0 or degree % kv_heads == 0]
        yield (
            f"parallel.tp={tp} must divide model.num_kv_heads={kv_heads} or be a multiple of it, so that each rank's "
            f"query heads have their key and value heads. Use {either(allowed)}."
        )
    if tp > 1 and config.precision.attention == "quantized":
        yield (
            f"precision.attention=quantized needs whole projections, so parallel.tp=1, not {tp}. "
            f"Set precision.attention=bf16."
        )
    if length >= 2 and length % tp:
        yield (
            f"data.seq_length={length} must be a multiple of parallel.tp={tp}, because the tp ranks share each row's "
            f"positions. Use {either(near_multiples(length, tp))}."
        )
    part = -(-model.vocab_size // tp)
    if part >= 1 and part * (tp - 1) >= model.vocab_size:
        yield (
            f"model.vocab_size={model.vocab_size} leaves a tp rank without a row of the embedding, with "
            f"parallel.tp={tp} parts of {part}. Use {part * tp}."
        )
    if expert_tp == tp and width >= 1 and width % tp:
        yield (
            f"parallel.expert_tp={expert_tp} must divide model.intermediate_size={width}. "
            f"Set parallel.expert_tp=1, or model.intermediate_size={either(near_multiples(width, tp))}."
        )


def shard_violations(config: Config, dp: int | None, world_size: int) -> Iterator[str]:
    """Yield violations of the even split of what FSDP shards in another dim than the first.

    Args:
        config: The configuration.
        world_size: Number of ranks.
        dp: `parallel.dp` as a number, or None where the degrees do not fit the world.
    """
    parallel, model = config.parallel, config.model
    if dp is None or not is_sound(config, "model.hidden_size", "model.intermediate_size", "model.vocab_size"):
        return
    if parallel.dp_replicate < 1 or dp % parallel.dp_replicate or parallel.expert_tp not in (1, parallel.tp):
        return
    shards = dp // parallel.dp_replicate
    if parallel.expert_tp == 1:
        yield from _whole_expert_violation(config, shards, _dp(config, dp, world_size))
    elif model.intermediate_size % parallel.tp == 0:
        yield from _expert_slice_violation(config, shards, _dp(config, dp, world_size))
    if model.vocab_size % parallel.tp and model.hidden_size % (shards * parallel.ep):
        yield (
            f"model.vocab_size={model.vocab_size} is no multiple of parallel.tp={parallel.tp}, so the embedding is "
            f"split in its other dim too, and parallel.dp·ep = {shards * parallel.ep} (without replicas) must divide "
            f"model.hidden_size={model.hidden_size}. "
            f"Use model.vocab_size={either(near_multiples(model.vocab_size, parallel.tp)[-1:])}, or other degrees."
        )


def _whole_expert_violation(config: Config, shards: int, dp_text: str) -> Iterator[str]:
    """Split dim 1 of [E, 2F, D] and [E, D, F] over the shard group, dp_shard × tp."""
    width, gate_up, tp = config.model.hidden_size, 2 * config.model.intermediate_size, config.parallel.tp
    common = gcd(width, gate_up)
    if common % (shards * tp) == 0:
        return
    group = f"parallel.dp={dp_text}" if tp == 1 else f"parallel.dp·tp = {dp_text}·{tp} = {_ranks(config, shards) * tp}"
    rule = (
        f"{group} must divide model.hidden_size={width} and 2·model.intermediate_size={gate_up}, "
        f"because the experts' weights are split evenly"
    )
    allowed = [group // tp for group in divisors(common) if group % tp == 0]
    yield f"{rule}{_without_replicas(config)}. {_use_dp(config, shards, allowed)}"


def _expert_slice_violation(config: Config, shards: int, dp_text: str) -> Iterator[str]:
    """Split dim 1 of [E, D, F/tp] and dim 2 of [E, 2, F/tp, D] over the shard group, dp_shard."""
    width, slice_width = config.model.hidden_size, config.model.intermediate_size // config.parallel.tp
    common = gcd(width, slice_width)
    if common % shards == 0:
        return
    rule = (
        f"parallel.dp={dp_text} must divide model.hidden_size={width} and model.intermediate_size/expert_tp="
        f"{slice_width}, because the experts' weights are split evenly"
    )
    yield f"{rule}{_without_replicas(config)}. {_use_dp(config, shards, divisors(common))}"


def _use_dp(config: Config, shards: int, allowed: list[int]) -> str:
    choices = [_ranks(config, degree) for degree in near(shards, allowed)]
    return f"Use dp {either(choices)}." if choices else f"Use another parallel.tp than {config.parallel.tp}."


def _ranks(config: Config, shards: int) -> int:
    return shards * config.parallel.dp_replicate


def _without_replicas(config: Config) -> str:
    replicas = config.parallel.dp_replicate
    return f" within each of {replicas} replicas" if replicas > 1 else ""


def _dp(config: Config, dp: int, world_size: int) -> str:
    return f"{dp} (auto, of {count_ranks(world_size)})" if config.parallel.dp == AUTO else f"{dp}"


def _world_violation(config: Config, world_size: int) -> str:
    parallel = config.parallel
    per_replica = parallel.ep * parallel.tp
    has = f"the world has {count_ranks(world_size)}"
    fits = world_size % per_replica == 0
    if parallel.dp == AUTO:
        choices = divisors(gcd(world_size, max(config.model.num_experts, 1)))
        return (
            f"parallel.ep·tp = {parallel.ep}·{parallel.tp} = {per_replica} must divide the number of ranks, but {has}. "
            f"Set parallel.ep={either(choices)}, or start {count_ranks(per_replica)} or a multiple of it."
        )
    product = parallel.dp * per_replica
    start = f"start {count_ranks(product)}."
    remedy = f"Set parallel.dp={world_size // per_replica}, or {start}" if fits else start.capitalize()
    return f"parallel.dp·ep·tp = {parallel.dp}·{parallel.ep}·{parallel.tp} = {product}, but {has}. {remedy}"


def count_ranks(ranks: int) -> str:
    """Return a number of ranks as text."""
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"
