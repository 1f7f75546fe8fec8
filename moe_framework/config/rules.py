"""The rules that do not depend on the number of ranks, one function per section.

Each function yields the violations it finds, as complete sentences: value, rule, remedy.
"""

from collections.abc import Iterator
from operator import attrgetter

from moe_framework.config.schema import AUTO, Config
from moe_framework.errors import ConfigError
from moe_framework.precision.modes import AUTO8, EMULATED, MODES, TARGETS, Capability, resolve_mode

# moe_framework.data.tokenizer.NucleotideTokenizer.vocab_size; data and config are siblings that do not import
# each other, so a unit test compares the two.
NUCLEOTIDE_VOCAB_SIZE = 8

# torch.nn.functional.grouped_mm refuses strides that are not multiples of this.
_ALIGNMENT_BYTES = 16

_LARGEST_SEED = 2**63 - 1
_LONGEST_FILE_NAME_BYTES = 255

_AT_LEAST = {
    "parallel.dp": 1,
    "parallel.ep": 1,
    "parallel.tp": 1,
    "parallel.dp_replicate": 1,
    "parallel.expert_tp": 1,
    "model.num_layers": 1,
    "model.hidden_size": 1,
    "model.intermediate_size": 1,
    "model.num_heads": 1,
    "model.num_kv_heads": 1,
    "model.head_dim": 2,
    "model.num_experts": 1,
    "model.top_k": 1,
    "model.max_positions": 2,
    "precision.bf16_first_layers": 0,
    "precision.bf16_last_layers": 0,
    "moe.aux_loss_coeff": 0,
    "moe.z_loss_coeff": 0,
    "data.seq_length": 2,
    "data.prefetch": 0,
    "optim.min_lr": 0,
    "optim.warmup_steps": 0,
    "optim.decay_steps": 0,
    "optim.weight_decay": 0,
    "optim.clip_norm": 0,
    "train.max_steps": 1,
    "train.global_batch_size": 1,
    "train.micro_batch_size": 1,
    "train.max_nonfinite_steps": 1,
    "train.loss_spike_sigmas": 0,
    "train.log_every": 1,
    "eval.every": 0,
    "eval.max_rows": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 0,
    "checkpoint.max_failed_saves": 0,
    "resilience.hang_timeout_s": 0,
    "resilience.max_failures_per_step": 1,
}
_ABOVE_ZERO = ("model.rope_theta", "model.norm_eps", "model.init_std", "optim.lr", "optim.eps")
_NOT_EMPTY = ("run.dir", "data.path", "checkpoint.ckpt_dir", "checkpoint.resume", "checkpoint.init_from")


def is_sound(config: Config, *paths: str) -> bool:
    """Return whether the keys respect their own lower bounds, so that a rule between them makes sense."""
    values = {path: attrgetter(path)(config) for path in paths}
    return all(value in (None, AUTO) or value >= _AT_LEAST.get(path, 1) for path, value in values.items())


def range_violations(config: Config) -> Iterator[str]:
    """Yield violations of the bounds of single keys."""
    for path, least in _AT_LEAST.items():
        value = attrgetter(path)(config)
        if value not in (None, AUTO) and value < least:
            yield f"{path}={value} must be at least {least}."
    for path in _ABOVE_ZERO:
        if (value := attrgetter(path)(config)) <= 0:
            yield f"{path}={value} must be greater than 0."
    for path in _NOT_EMPTY:
        value = attrgetter(path)(config)
        if value is not None and not value.strip():
            yield f"{path}='{value}' must not be empty. Give a path, or leave the key out."
    for path in ("optim.beta1", "optim.beta2"):
        if not 0 <= (value := attrgetter(path)(config)) < 1:
            yield f"{path}={value} must be at least 0 and less than 1."
    if not 0 < config.data.heldout_fraction < 1:
        yield f"data.heldout_fraction={config.data.heldout_fraction} must be greater than 0 and less than 1."
    if not 0 <= config.train.seed <= _LARGEST_SEED:
        yield f"train.seed={config.train.seed} must be from 0 to {_LARGEST_SEED}."


def run_violations(config: Config) -> Iterator[str]:
    """Yield violations of the run's name, which becomes a folder."""
    name = config.run.name
    plain = name.strip() == name and name.isprintable() and name not in ("", ".", "..")
    if not plain or "/" in name or "\\" in name or len(name.encode()) > _LONGEST_FILE_NAME_BYTES:
        yield (
            f"run.name={name} must be a plain folder name: not empty, no '/' or '\\', no space at its ends, "
            f"at most {_LONGEST_FILE_NAME_BYTES} bytes. Put the parent folder in run.dir."
        )


def model_violations(config: Config) -> Iterator[str]:
    """Yield violations of the model's shape."""
    model = config.model
    yield from _top_k_violations(model.top_k, model.num_experts)
    if model.vocab_size < NUCLEOTIDE_VOCAB_SIZE:
        yield (
            f"model.vocab_size={model.vocab_size} must be at least {NUCLEOTIDE_VOCAB_SIZE}, "
            f"the size of the nucleotide tokenizer."
        )
    if not is_sound(config, "model.num_heads", "model.num_kv_heads", "model.hidden_size", "model.head_dim"):
        return
    if model.num_heads % model.num_kv_heads:
        yield (
            f"model.num_kv_heads={model.num_kv_heads} must divide model.num_heads={model.num_heads}. "
            f"Use {either(divisors(model.num_heads))}."
        )
    if model.head_dim is None and model.hidden_size % model.num_heads:
        yield (
            f"model.num_heads={model.num_heads} must divide model.hidden_size={model.hidden_size} when "
            f"model.head_dim is null. Use {either(near(model.num_heads, divisors(model.hidden_size)))}, "
            f"or set model.head_dim."
        )
    elif model.resolved_head_dim % 2:
        value = "null" if model.head_dim is None else model.head_dim
        yield (
            f"model.head_dim={value} makes heads of {model.resolved_head_dim} channels, and RoPE needs an even number. "
            f"Set model.head_dim={model.resolved_head_dim + 1}."
        )


def _top_k_violations(top_k: int, num_experts: int) -> Iterator[str]:
    allowed = f"2 to {num_experts}" if num_experts > 2 else f"{num_experts}"
    if top_k > num_experts >= 1:
        yield f"model.top_k={top_k} must be at most model.num_experts={num_experts}. Use {allowed}."
    elif top_k == 1 < num_experts:
        yield (
            f"model.top_k=1 must be at least 2 with model.num_experts={num_experts}: the weights of a token's experts "
            f"are normalised to a sum of 1, so a single one is always 1, and the loss gives the router no gradient. "
            f"Use {allowed}, or model.num_experts=1. "
            f"A checkpoint converted with one expert per token cannot be trained."
        )


def backend_violations(config: Config) -> Iterator[str]:
    """Yield violations of the expert and dispatcher backends."""
    if config.dispatcher.backend == "local" and config.parallel.ep > 1:
        yield (
            f"dispatcher.backend=local moves no tokens, so it needs parallel.ep=1, not {config.parallel.ep}. "
            f"Use dispatcher.backend=all_to_all or auto."
        )
    if config.experts.backend in ("te", "scaled_mm") and "cpu" in (config.device, config.hardware.target):
        yield f"experts.backend={config.experts.backend} needs a CUDA device. Set experts.backend=auto."
    elif config.experts.backend == "scaled_mm":
        yield from _scaled_mm_violations(config)
    if config.experts.backend in ("loop", "grouped_mm", "sequential") and config.precision.mode not in ("fp32", "bf16"):
        yield (
            f"experts.backend={config.experts.backend} computes in bf16, so precision.mode={config.precision.mode} "
            f"would not be quantized. Set experts.backend=auto, or precision.mode=bf16."
        )
    yield from _bf16_layers_violations(config)
    yield from _attention_violations(config)
    if config.experts.backend != "grouped_mm":
        return
    mode = config.precision.mode
    needs = f"experts.backend=grouped_mm in {mode}, which needs strides of {_ALIGNMENT_BYTES} bytes"
    yield from _width_violations(config, _ALIGNMENT_BYTES // (4 if mode == "fp32" else 2), needs, "loop")
    if config.device == "cuda" and mode == "fp32":
        yield (
            f"experts.backend=grouped_mm on device=cuda computes in bf16 only, not precision.mode={mode}. "
            f"Use precision.mode=bf16 or experts.backend=loop."
        )


def _scaled_mm_violations(config: Config) -> Iterator[str]:
    mode = config.precision.mode
    capability = TARGETS.get(config.hardware.target)
    known = mode == AUTO8 and capability is not None and capability >= (9, 0)
    meant = resolve_mode(mode, capability, "") if known else mode
    if meant not in ("fp8_current", AUTO8):
        there = "" if meant == mode else f", which is {meant} on hardware.target={config.hardware.target}"
        yield (
            f"experts.backend=scaled_mm computes in fp8_current alone, not precision.mode={mode}{there}. "
            f"Set experts.backend=auto, or precision.mode=fp8_current."
        )
    needs = f"experts.backend=scaled_mm, whose FP8 products need strides of {_ALIGNMENT_BYTES} bytes"
    yield from _width_violations(config, _ALIGNMENT_BYTES, needs, "auto")


def _width_violations(config: Config, alignment: int, needs: str, other: str) -> Iterator[str]:
    for path, parts in (("model.hidden_size", 1), ("model.intermediate_size", max(config.parallel.expert_tp, 1))):
        size, multiple = attrgetter(path)(config), alignment * parts
        if size >= 1 and size % multiple:
            yield (
                f"{path}={size} must be a multiple of {multiple} for {needs}. "
                f"Use {either(near_multiples(size, multiple))}, or experts.backend={other}."
            )


def _bf16_layers_violations(config: Config) -> Iterator[str]:
    precision, num_layers = config.precision, config.model.num_layers
    first, last = precision.bf16_first_layers, precision.bf16_last_layers
    sound = is_sound(config, "precision.bf16_first_layers", "precision.bf16_last_layers", "model.num_layers")
    if precision.mode not in ("fp32", "bf16") and sound and first + last >= num_layers:
        yield (
            f"precision.bf16_first_layers + precision.bf16_last_layers = {first} + {last} must be less than "
            f"model.num_layers={num_layers}, or precision.mode={precision.mode} would quantize nothing. "
            f"Lower them, or use precision.mode=bf16."
        )


def _attention_violations(config: Config) -> Iterator[str]:
    mode = config.precision.mode
    if config.precision.attention == "bf16":
        return
    if mode != AUTO8 and not MODES[mode].attention:
        able = ", ".join(name for name, properties in MODES.items() if properties.attention)
        yield (
            f"precision.attention=quantized is not available in precision.mode={mode}. "
            f"Use one of {able}, or precision.attention=bf16."
        )
        return
    multiple = 32 if mode == EMULATED else 16
    sizes = config.model
    heads = {"num_heads": sizes.num_heads, "num_kv_heads": sizes.num_kv_heads}
    widths = {f"model.{name} · head_dim": count * sizes.resolved_head_dim for name, count in heads.items()}
    if mode != EMULATED:
        # The product for the weights' gradient sums over them; the emulation pads.
        widths["train.micro_batch_size · data.seq_length"] = config.train.micro_batch_size * config.data.seq_length
    for name, width in {"model.hidden_size": sizes.hidden_size, **widths}.items():
        if width % multiple:
            yield (
                f"{name}={width} must be a multiple of {multiple} for precision.attention=quantized in {mode}. "
                f"Use {either(near_multiples(width, multiple))}, or precision.attention=bf16."
            )


def data_violations(config: Config) -> Iterator[str]:
    """Yield violations of the rows' length and overlap."""
    data, limit = config.data, config.model.max_positions
    if data.seq_length > limit and is_sound(config, "model.max_positions"):
        yield (
            f"data.seq_length={data.seq_length} must be at most model.max_positions={limit}. "
            f"Shorten the rows or raise model.max_positions."
        )
    if data.seq_length >= 1 and not 0 <= data.stride < data.seq_length:
        yield (
            f"data.stride={data.stride} is the overlap of consecutive windows, so it must be at least 0 and less than "
            f"data.seq_length={data.seq_length}."
        )


def checkpoint_violations(config: Config) -> Iterator[str]:
    """Yield contradictions about where a run starts; whether a path exists is the store's to say."""
    resume, init_from = config.checkpoint.resume, config.checkpoint.init_from
    if resume.lower() in ("true", "false", "yes", "no", "none", "latest"):
        yield f"checkpoint.resume={resume} must be auto, never, or the path of a step folder or of a folder of steps."
    elif resume not in (AUTO, "never") and init_from is not None:
        yield (
            f"checkpoint.init_from={init_from} starts a new run, and checkpoint.resume={resume} continues one. "
            f"Give only one of them."
        )
    vocab = config.model.vocab_size
    if init_from is not None and config.data.path is None and vocab != NUCLEOTIDE_VOCAB_SIZE:
        yield (
            f"checkpoint.init_from={init_from}: data.path=null would train this model of model.vocab_size={vocab} on "
            "the E. coli genome of the demo. Set data.path."
        )


def _mode_violations(config: Config, capability: Capability | None, where: str) -> Iterator[str]:
    try:
        resolve_mode(config.precision.mode, capability, where)
    except ConfigError as error:
        yield from error.violations


def hardware_violations(config: Config) -> Iterator[str]:
    """Yield contradictions between the device and the machine that the configuration is for."""
    target, device = config.hardware.target, config.device
    if target == AUTO:
        if device == "cpu":
            yield from _mode_violations(config, None, "device=cpu")
        return
    yield from _mode_violations(config, TARGETS[target], f"hardware.target={target}")
    if not config.train.dry_run:
        yield (
            f"hardware.target={target} validates for a machine that may not be this one, so it needs "
            f"train.dry_run=true. Set it, or use hardware.target=auto."
        )
    if device != AUTO and (device == "cpu") != (target == "cpu"):
        yield f"device={device} contradicts hardware.target={target}. Use device=auto."


def divisors(n: int) -> list[int]:
    """Return the divisors of a positive integer, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def near(value: int, choices: list[int]) -> list[int]:
    """Return the largest choice below `value` and the smallest above, where there are such."""
    below, above = [c for c in choices if c < value], [c for c in choices if c > value]
    return below[-1:] + above[:1]


def near_multiples(value: int, unit: int) -> list[int]:
    """Return the positive multiples of `unit` next to `value`."""
    below = value // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple > 0]


def either(choices: list[int]) -> str:
    """Return choices as text: `1, 2, 4 or 8`."""
    *most, last = map(str, choices)
    return f"{', '.join(most)} or {last}" if most else last
