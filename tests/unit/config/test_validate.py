"""Every rule between keys is broken once; the message names value, rule and remedy."""

import pytest

from moe_framework.config.load import load_config
from moe_framework.config.rules import NUCLEOTIDE_VOCAB_SIZE, divisors
from moe_framework.config.validate import is_planned, planned_world_size, validate
from moe_framework.data.tokenizer import NucleotideTokenizer
from moe_framework.errors import ConfigError
from tests.unit.config.validation import CONFIGS, check, violations_of

MAX_SEED = 2**63 - 1


# Overrides of L0_sanity on two ranks, and the whole message that they must give, alone.
RULES = [
    # bounds of single keys
    ("parallel.tp=0", "parallel.tp=0 must be at least 1."),
    ("parallel.dp=0", "parallel.dp=0 must be at least 1."),
    ("parallel.dp_replicate=0", "parallel.dp_replicate=0 must be at least 1."),
    ("parallel.expert_tp=0", "parallel.expert_tp=0 must be at least 1."),
    ("model.num_layers=0", "model.num_layers=0 must be at least 1."),
    ("model.hidden_size=0", "model.hidden_size=0 must be at least 1."),
    ("model.intermediate_size=-4", "model.intermediate_size=-4 must be at least 1."),
    ("model.num_heads=0", "model.num_heads=0 must be at least 1."),
    ("model.num_kv_heads=0", "model.num_kv_heads=0 must be at least 1."),
    ("model.head_dim=0", "model.head_dim=0 must be at least 2."),
    ("model.num_experts=0", "model.num_experts=0 must be at least 1."),
    ("model.top_k=0", "model.top_k=0 must be at least 1."),
    ("model.max_positions=0", "model.max_positions=0 must be at least 2."),
    ("model.rope_theta=0", "model.rope_theta=0.0 must be greater than 0."),
    ("model.norm_eps=0", "model.norm_eps=0.0 must be greater than 0."),
    ("model.init_std=0", "model.init_std=0.0 must be greater than 0."),
    ("moe.aux_loss_coeff=-1", "moe.aux_loss_coeff=-1.0 must be at least 0."),
    ("moe.z_loss_coeff=-1", "moe.z_loss_coeff=-1.0 must be at least 0."),
    ("data.seq_length=1", "data.seq_length=1 must be at least 2."),
    ("data.prefetch=-1", "data.prefetch=-1 must be at least 0."),
    ("data.heldout_fraction=0", "data.heldout_fraction=0.0 must be greater than 0 and less than 1."),
    ("data.heldout_fraction=1", "data.heldout_fraction=1.0 must be greater than 0 and less than 1."),
    ("data.path=''", "data.path='' must not be empty. Give a path, or leave the key out."),
    ("optim.lr=0", "optim.lr=0.0 must be greater than 0."),
    ("optim.min_lr=-1", "optim.min_lr=-1.0 must be at least 0."),
    ("optim.warmup_steps=-1", "optim.warmup_steps=-1 must be at least 0."),
    ("optim.weight_decay=-0.1", "optim.weight_decay=-0.1 must be at least 0."),
    ("optim.clip_norm=-1", "optim.clip_norm=-1.0 must be at least 0."),
    ("optim.eps=0", "optim.eps=0.0 must be greater than 0."),
    ("optim.beta1=1", "optim.beta1=1.0 must be at least 0 and less than 1."),
    ("optim.beta2=-0.1", "optim.beta2=-0.1 must be at least 0 and less than 1."),
    ("train.max_steps=0", "train.max_steps=0 must be at least 1."),
    ("train.global_batch_size=0", "train.global_batch_size=0 must be at least 1."),
    ("train.micro_batch_size=0", "train.micro_batch_size=0 must be at least 1."),
    ("train.max_nonfinite_steps=0", "train.max_nonfinite_steps=0 must be at least 1."),
    ("train.log_every=0", "train.log_every=0 must be at least 1."),
    ("train.seed=-1", f"train.seed=-1 must be from 0 to {MAX_SEED}."),
    (f"train.seed={MAX_SEED + 1}", f"train.seed={MAX_SEED + 1} must be from 0 to {MAX_SEED}."),
    ("eval.every=-1", "eval.every=-1 must be at least 0."),
    ("eval.max_rows=-1", "eval.max_rows=-1 must be at least 0."),
    ("checkpoint.every=-1", "checkpoint.every=-1 must be at least 0."),
    ("checkpoint.keep=-1", "checkpoint.keep=-1 must be at least 0."),
    # model
    ("model.top_k=9", "model.top_k=9 must be at most model.num_experts=8. Use 2 to 8."),
    (
        "model.top_k=3 model.num_experts=2",
        "model.top_k=3 must be at most model.num_experts=2. Use 2.",
    ),
    (
        "model.top_k=1",
        "model.top_k=1 must be at least 2 with model.num_experts=8: the weights of a token's experts are normalised to "
        "a sum of 1, so a single one is always 1, and the loss gives the router no gradient. Use 2 to 8, or "
        "model.num_experts=1. A checkpoint converted with one expert per token cannot be trained.",
    ),
    ("model.vocab_size=7", "model.vocab_size=7 must be at least 8, the size of the nucleotide tokenizer."),
    ("model.num_kv_heads=3", "model.num_kv_heads=3 must divide model.num_heads=4. Use 1, 2 or 4."),
    (
        "model.num_heads=12",
        "model.num_heads=12 must divide model.hidden_size=128 when model.head_dim is null. "
        "Use 8 or 16, or set model.head_dim.",
    ),
    (
        "model.head_dim=3",
        "model.head_dim=3 makes heads of 3 channels, and RoPE needs an even number. Set model.head_dim=4.",
    ),
    (
        "model.num_heads=128",
        "model.head_dim=null makes heads of 1 channels, and RoPE needs an even number. Set model.head_dim=2.",
    ),
    # backends
    (
        "dispatcher.backend=local",
        "dispatcher.backend=local moves no tokens, so it needs parallel.ep=1, not 2. "
        "Use dispatcher.backend=all_to_all or auto.",
    ),
    (
        "experts.backend=grouped_mm model.intermediate_size=130",
        "model.intermediate_size=130 must be a multiple of 4 for experts.backend=grouped_mm in fp32, which needs "
        "strides of 16 bytes. Use 128 or 132, or experts.backend=loop.",
    ),
    (
        "experts.backend=grouped_mm precision.mode=bf16 model.hidden_size=132 model.head_dim=32",
        "model.hidden_size=132 must be a multiple of 8 for experts.backend=grouped_mm in bf16, which needs strides "
        "of 16 bytes. Use 128 or 136, or experts.backend=loop.",
    ),
    (
        "experts.backend=grouped_mm device=cuda",
        "experts.backend=grouped_mm on device=cuda computes in bf16 only, not precision.mode=fp32. "
        "Use precision.mode=bf16 or experts.backend=loop.",
    ),
    (
        "experts.backend=sequential precision.mode=mxfp8_emulated",
        "experts.backend=sequential computes in bf16, so precision.mode=mxfp8_emulated would not be quantized. "
        "Set experts.backend=auto, or precision.mode=bf16.",
    ),
    (
        "experts.backend=loop precision.mode=mxfp8_emulated",
        "experts.backend=loop computes in bf16, so precision.mode=mxfp8_emulated would not be quantized. "
        "Set experts.backend=auto, or precision.mode=bf16.",
    ),
    (
        "experts.backend=te device=cpu",
        "experts.backend=te needs a CUDA device. Set experts.backend=auto.",
    ),
    (
        "experts.backend=scaled_mm device=cpu",
        "experts.backend=scaled_mm needs a CUDA device. Set experts.backend=auto.",
    ),
    (
        "experts.backend=scaled_mm precision.mode=bf16 device=cuda",
        "experts.backend=scaled_mm computes in fp8_current alone, not precision.mode=bf16. "
        "Set experts.backend=auto, or precision.mode=fp8_current.",
    ),
    (
        "experts.backend=scaled_mm precision.mode=auto8 hardware.target=b200 train.dry_run=true",
        "experts.backend=scaled_mm computes in fp8_current alone, not precision.mode=auto8, which is mxfp8 on "
        "hardware.target=b200. Set experts.backend=auto, or precision.mode=fp8_current.",
    ),
    (
        "experts.backend=scaled_mm precision.mode=fp8_current device=cuda model.hidden_size=136 model.head_dim=32",
        "model.hidden_size=136 must be a multiple of 16 for experts.backend=scaled_mm, whose FP8 products need strides "
        "of 16 bytes. Use 128 or 144, or experts.backend=auto.",
    ),
    (
        "precision.mode=fp8_current device=cpu",
        "precision.mode=fp8_current needs compute capability 8.9 or newer; device=cpu has none, being no CUDA device. "
        "Use one of fp32, bf16, mxfp8_emulated.",
    ),
    (
        "precision.mode=auto8 hardware.target=a100 train.dry_run=true",
        "precision.mode=auto8 needs compute capability 9.0 (Hopper) or newer; hardware.target=a100 has 8.0. "
        "Use precision.mode=bf16, or mxfp8_emulated to study 8-bit experts anywhere.",
    ),
    (
        "precision.bf16_first_layers=-1",
        "precision.bf16_first_layers=-1 must be at least 0.",
    ),
    (
        "precision.mode=mxfp8_emulated precision.bf16_first_layers=3 precision.bf16_last_layers=1",
        "precision.bf16_first_layers + precision.bf16_last_layers = 3 + 1 must be less than model.num_layers=4, or "
        "precision.mode=mxfp8_emulated would quantize nothing. Lower them, or use precision.mode=bf16.",
    ),
    # data
    (
        "data.seq_length=1025",
        "data.seq_length=1025 must be at most model.max_positions=1024. Shorten the rows or raise model.max_positions.",
    ),
    (
        "data.stride=256",
        "data.stride=256 is the overlap of consecutive windows, so it must be at least 0 and less than "
        "data.seq_length=256.",
    ),
    # schedule and batch
    (
        "optim.min_lr=1",
        "optim.min_lr=1.0 must be at most optim.lr=0.003. Lower optim.min_lr or raise optim.lr.",
    ),
    (
        "train.max_steps=20",
        "optim.warmup_steps=30 must be at most train.max_steps=20, or the learning rate never reaches its peak. "
        "Set optim.warmup_steps=2, or raise train.max_steps.",
    ),
    ("optim.decay_steps=-1", "optim.decay_steps=-1 must be at least 0."),
    (
        "optim.schedule=linear optim.decay_steps=9",
        "optim.decay_steps=9 needs optim.schedule=wsd, not linear, which has no decay of a length of its own. "
        "Set optim.schedule=wsd, or leave optim.decay_steps out.",
    ),
    (
        "optim.schedule=wsd",
        "optim.decay_steps=0 must be at least 1 for optim.schedule=wsd, and at most "
        "train.max_steps - optim.warmup_steps = 400 - 30 = 370. Use 1 to 370, such as 40.",
    ),
    (
        "optim.schedule=wsd optim.decay_steps=371",
        "optim.decay_steps=371 must be at least 1 for optim.schedule=wsd, and at most "
        "train.max_steps - optim.warmup_steps = 400 - 30 = 370. Use 1 to 370, such as 40.",
    ),
    (
        "optim.schedule=wsd optim.warmup_steps=399 optim.decay_steps=20",
        "optim.decay_steps=20 must be at least 1 for optim.schedule=wsd, and at most "
        "train.max_steps - optim.warmup_steps = 400 - 399 = 1. Use 1 to 1, such as 1.",
    ),
    (
        "optim.schedule=wsd optim.warmup_steps=400",
        "optim.decay_steps=0 must be at least 1 for optim.schedule=wsd, and at most "
        "train.max_steps - optim.warmup_steps = 400 - 400 = 0. Lower optim.warmup_steps.",
    ),
    (
        "train.global_batch_size=36",
        "train.global_batch_size=36 must be a multiple of train.micro_batch_size·parallel.dp·ep = 4·1·2 = 8, so that "
        "accumulation is whole. Use 32 or 40, or another train.micro_batch_size.",
    ),
    (
        "train.global_batch_size=4",
        "train.global_batch_size=4 must be a multiple of train.micro_batch_size·parallel.dp·ep = 4·1·2 = 8, so that "
        "accumulation is whole. Use 8, or another train.micro_batch_size.",
    ),
    # checkpoint
    (
        "checkpoint.resume=latest",
        "checkpoint.resume=latest must be auto, never, or the path of a step folder or of a folder of steps.",
    ),
    (
        "checkpoint.init_from=/b model.vocab_size=9",
        "checkpoint.init_from=/b: data.path=null would train this model of model.vocab_size=9 on the E. coli genome of "
        "the demo. Set data.path.",
    ),
    (
        "checkpoint.resume=/a checkpoint.init_from=/b",
        "checkpoint.init_from=/b starts a new run, and checkpoint.resume=/a continues one. Give only one of them.",
    ),
    # hardware
    (
        "hardware.target=h100",
        "hardware.target=h100 validates for a machine that may not be this one, so it needs train.dry_run=true. "
        "Set it, or use hardware.target=auto.",
    ),
    (
        "hardware.target=h100 train.dry_run=true device=cpu",
        "device=cpu contradicts hardware.target=h100. Use device=auto.",
    ),
    (
        "hardware.target=cpu train.dry_run=true device=cuda",
        "device=cuda contradicts hardware.target=cpu. Use device=auto.",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), RULES, ids=[rule[0] for rule in RULES])
def test_broken_rule_gives_its_message_alone(overrides: str, message: str):
    assert violations_of(overrides) == [message]


@pytest.mark.parametrize("name", ["''", ".", "..", "a/b", "'a\\b'", "'a\tb'", "x" * 256, "'" + "é" * 128 + "'"])
def test_run_name_that_is_no_plain_folder_is_refused(name: str):
    with pytest.raises(ConfigError, match="must be a plain folder name"):
        validate(load_config("L0_sanity", [f"run.name={name}"], CONFIGS), world_size=2)


@pytest.mark.parametrize(
    "overrides",
    [
        "",
        "optim.min_lr=2e-3",
        "optim.warmup_steps=300",
        "optim.schedule=linear",
        "optim.schedule=constant optim.min_lr=1",
        "optim.schedule=wsd optim.decay_steps=370",
        "optim.schedule=wsd optim.decay_steps=1",
        "experts.backend=scaled_mm precision.mode=auto8 hardware.target=h200 train.dry_run=true",
        "model.top_k=8",
        "model.top_k=2",
        "model.top_k=1 model.num_experts=1 parallel.ep=1",
        "precision.mode=mxfp8_emulated precision.bf16_first_layers=2 precision.bf16_last_layers=1",
        "precision.mode=bf16 precision.bf16_first_layers=4 precision.bf16_last_layers=1",
        "data.seq_length=1024 data.stride=1023",
        "data.prefetch=0 eval.every=0 checkpoint.every=0 checkpoint.keep=0 optim.clip_norm=0",
        "checkpoint.init_from=/b",
        "checkpoint.init_from=/b model.vocab_size=9 data.path=/c",
        "checkpoint.resume=/a",
        "dispatcher.backend=all_to_all experts.backend=loop model.intermediate_size=130",
        "dispatcher.backend=local parallel.ep=1",
        f"train.seed={MAX_SEED}",
        "model.num_heads=5 model.num_kv_heads=1 model.head_dim=32",
        "device=cuda",
    ],
)
def test_limits_themselves_are_allowed(overrides: str):
    assert check(overrides).parallel.dp in (1, 2)


@pytest.mark.parametrize(
    ("overrides", "local_world_size", "devices", "message"),
    [
        ("device=cuda", 2, 0, "device=cuda, but no CUDA device is visible. Use device=cpu or auto."),
        ("device=cuda", 2, 1, "device=cuda: this host shows 1 CUDA devices for 2 ranks."),
        ("device=auto", 2, 1, "device=auto: this host shows 1 CUDA devices for 2 ranks."),
    ],
)
def test_too_few_gpus_are_refused(overrides: str, local_world_size: int, devices: int, message: str):
    (violation,) = violations_of(overrides, local_world_size=local_world_size, cuda_device_count=devices)
    assert violation.startswith(message)


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [("device=auto", 0), ("device=cpu", 1), ("device=cuda", 2), ("device=cuda", None)],
)
def test_device_that_the_host_can_give_is_allowed(overrides: str, devices: int | None):
    check(overrides, local_world_size=2, cuda_device_count=devices)


def test_dry_run_for_another_machine_takes_the_ranks_from_the_degrees():
    planned = load_config("L0_sanity", ["hardware.target=h100", "train.dry_run=true", "device=cuda"], CONFIGS)
    assert is_planned(planned)
    assert planned_world_size(planned) == 2
    assert validate(planned, world_size=2, local_world_size=1, cuda_device_count=0).parallel.dp == 1
    assert not is_planned(load_config("L0_sanity", ["train.dry_run=true"], CONFIGS))


def test_all_violations_are_reported_at_once_and_in_the_same_order():
    overrides = "parallel.ep=3 model.top_k=9 optim.lr=-1 run.name=a/b data.stride=512 checkpoint.keep=-1"
    violations = violations_of(overrides, world_size=3)
    assert len(violations) == 7
    assert violations == violations_of(overrides, world_size=3)


def test_vocabulary_bound_is_the_tokenizers_size():
    assert NucleotideTokenizer.vocab_size == NUCLEOTIDE_VOCAB_SIZE


@pytest.mark.parametrize("n", [1, 2, 7, 12, 36, 97, 256])
def test_divisors_are_all_and_ascending(n: int):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
