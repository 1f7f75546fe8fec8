"""The memory estimate of a configuration, as a table and a comparison with a GPU. Free of torch."""

from collections.abc import Iterator

from moe_framework.config.schema import AUTO, Config
from moe_framework.planning.hardware import Memory, installed_memory, target_memory
from moe_framework.planning.job import Job
from moe_framework.planning.memory import MemoryEstimate, estimate_memory
from moe_framework.precision.modes import AUTO8, EMULATED, Capability, available_modes, compute_format

# From this many experts on a rank on, `experts.backend=auto` has found the grouped kernel in bf16 the fastest.
MANY_EXPERTS = 16
# Six measured runs were within 1.1% (docs/operations.md), but the CUDA context, NCCL and gaps between allocations come
# on top, and not every mode was measured: from here on a run may not fit.
MARGIN = 0.1

_COMPUTE_BYTES = {"fp32": 4, "bf16": 2}
# Bytes a parameter that Transformer Engine keeps for backward: both orders of the quantized weight, and its scales.
_TE_COPY_BYTES = {
    "fp8_current": 2.0,
    "fp8_delayed": 2.0,
    "fp8_block": 2.0,
    "mxfp8": 2.0 * (1 + 1 / 32),
    "nvfp4": 2.0 * (1 / 2 + 1 / 16),
}
# `scaled_mm` keeps the transposed weight alone.
_SCALED_MM_COPY_BYTES = 1.0


def job_of(config: Config, capability: Capability | None = None) -> Job:
    """Take from a configuration what decides memory; what `auto` would measure is assumed.

    `experts.backend=auto` is taken for `grouped_mm` with more than `MANY_EXPERTS` experts on a rank, for `scaled_mm` in
    fp8_current, for Transformer Engine in the other quantized modes, else for `sequential`.

    Args:
        config: Validated; dp is resolved.
        capability: Of the GPU; where it is not known, `precision.mode=auto8` is taken for fp8_current.
    """
    parallel, model, train = config.parallel, config.model, config.train
    assert isinstance(parallel.dp, int), "validate() resolves dp"
    mode, backend = _mode(config, capability), assumed_backend(config, capability)
    quantized = backend in ("scaled_mm", "te") and mode in _TE_COPY_BYTES
    first, last = config.precision.bf16_first_layers, model.num_layers - config.precision.bf16_last_layers
    return Job(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.resolved_head_dim,
        num_experts=model.num_experts,
        top_k=model.top_k,
        vocab_size=model.vocab_size,
        tie_embeddings=model.tie_embeddings,
        qk_norm=model.qk_norm,
        dp_shard=parallel.dp // parallel.dp_replicate,
        dp_replicate=parallel.dp_replicate,
        ep=parallel.ep,
        tp=parallel.tp,
        expert_tp=parallel.expert_tp,
        micro_batch_size=train.micro_batch_size,
        seq_length=config.data.seq_length,
        micro_steps=train.global_batch_size // (train.micro_batch_size * parallel.dp * parallel.ep),
        compute_bytes=_COMPUTE_BYTES[compute_format(mode)],
        experts_kernel="grouped" if backend in ("grouped_mm", EMULATED) else "sequential",
        quantized_layers=range(first, last) if quantized else range(0),
        copy_bytes=_SCALED_MM_COPY_BYTES if backend == "scaled_mm" else _TE_COPY_BYTES.get(mode, 0.0),
        experts_are_recomputed=backend != "te",
        activation_checkpointing=train.activation_checkpointing,
        compiled=train.compile,
        masked=config.data.separate_documents,
    )


def assumed_backend(config: Config, capability: Capability | None = None) -> str:
    """Return `experts.backend`, or what `auto` is assumed to find; see `job_of`."""
    backend, mode = config.experts.backend, _mode(config, capability)
    if backend != AUTO:
        return backend
    if mode == EMULATED:
        return EMULATED
    if config.model.num_experts // config.parallel.ep > MANY_EXPERTS or mode == "fp32":
        return "grouped_mm"
    if mode == "fp8_current":
        return "scaled_mm"
    return "te" if mode in _TE_COPY_BYTES else "sequential"


def memory_here(config: Config) -> Memory | None:
    """Return the memory of the GPU that a configuration is for: the target's, or this machine's.

    Returns:
        The memory; None for a CPU, or where there is no GPU.
    """
    if config.hardware.target != AUTO:
        return target_memory(config.hardware.target)
    return None if config.device == "cpu" else installed_memory()


def describe_memory(config: Config, memory: Memory | None) -> str:
    """Describe the estimate of a validated configuration, and compare it with a GPU.

    Args:
        config: Validated; dp is resolved.
        memory: Of the GPU; None where there is none to compare with.

    Returns:
        Lines of text: the parts in GB (10^9 bytes), their sum, the comparison, and the size of a checkpoint.
    """
    capability = None if memory is None else memory.capability
    found = estimate_memory(job_of(config, capability))
    lines = [
        f"estimate of a rank's memory, in GB (10^9 bytes), at the fullest moment of a step: {found.peak.name} "
        f"(experts by {assumed_backend(config, capability)})"
    ]
    lines += [f"  {name:<34}{_gb(size, found.total):>9}{note}" for name, size, note in _parts(found)]
    lines += _comparison(config, found, memory)
    staged = f"; an asynchronous save copies {_gb(found.staged)} GB of it to host memory on each rank"
    lines.append(
        f"estimate of a checkpoint: {_gb(found.checkpoint)} GB on disk{staged if config.checkpoint.async_save else ''}"
    )
    return "\n".join(lines)


def _mode(config: Config, capability: Capability | None) -> str:
    if config.precision.mode != AUTO8:
        return config.precision.mode
    return "mxfp8" if "mxfp8" in available_modes(capability) else "fp8_current"


def _parts(found: MemoryEstimate) -> Iterator[tuple[str, int, str]]:
    peak = found.peak
    share = found.expert_parameters / (found.dense_parameters + found.expert_parameters)
    yield "weights, fp32", found.masters, f"  experts {_gb(round(share * found.masters), found.total)}"
    yield "Adam's moments, fp32", found.moments, f"  experts {_gb(round(share * found.moments), found.total)}"
    yield "gradients, fp32", peak.gradients, ""
    yield "experts' copies for backward", peak.copies, ""
    yield "weights gathered by FSDP", peak.gathered, ""
    yield "activations", peak.activations, ""
    yield "logits, gradients being computed", peak.working, ""
    yield "sum", found.total, ""


def _comparison(config: Config, found: MemoryEstimate, memory: Memory | None) -> Iterator[str]:
    if memory is None:
        yield "  no GPU to compare it with; hardware.target names one"
        return
    yield f"  {memory.owner:<34}{_gb(memory.num_bytes):>9}"
    if found.total > memory.num_bytes:
        yield (
            f"WARNING: the estimate, {_gb(found.total)} GB, is above the {_gb(memory.num_bytes)} GB of {memory.owner}. "
            f"What lowers it: {'; '.join(knobs(config))}."
        )
    elif found.total > memory.num_bytes * (1 - MARGIN):
        yield f"NOTE: the estimate is within {MARGIN:.0%} of what there is, and may be off. See docs/operations.md."


def knobs(config: Config) -> Iterator[str]:
    """Yield the settings that would lower the estimate, the cheapest in speed first."""
    parallel, train = config.parallel, config.train
    if parallel.ep < config.model.num_experts:
        yield f"more ranks that share the experts (parallel.ep={parallel.ep}, up to {config.model.num_experts})"
    yield f"more ranks that share weights and moments (parallel.dp={parallel.dp}{_replicas(config)})"
    if train.micro_batch_size > 1:
        yield f"a smaller train.micro_batch_size (now {train.micro_batch_size}), with more accumulation"
    if train.activation_checkpointing != "full":
        modes = "selective or full" if train.activation_checkpointing == "none" else "full"
        yield f"train.activation_checkpointing={modes}, which recomputes"
    if not train.compile and parallel.tp == 1:
        yield "train.compile=true, whose loss keeps no fp32 logits"
    if train.micro_batch_size == 1:
        yield f"parallel.tp (now {parallel.tp}), which shares out each row's positions"


def _replicas(config: Config) -> str:
    replicas = config.parallel.dp_replicate
    return f", or fewer replicas than parallel.dp_replicate={replicas}" if replicas > 1 else ""


def _gb(num_bytes: int, largest: int | None = None) -> str:
    """Format a size with as many decimals as the largest one beside it needs."""
    size = (num_bytes if largest is None else largest) / 1e9
    return f"{num_bytes / 1e9:.{1 if size >= 10 else 2 if size >= 1 else 4}f}"
