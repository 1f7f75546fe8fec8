"""Every configuration key, its default, its unit and its meaning.

These frozen dataclasses are the only home of defaults. A YAML file holds the differences from them, and
the command line beats the YAML. Field types are checked when a config is loaded (`load.py`); rules between
fields are checked by `validate.py`. Nothing here imports torch.
"""

from dataclasses import dataclass, field
from typing import Literal

AUTO = "auto"


@dataclass(frozen=True)
class RunConfig:
    """Where a run writes.

    Attributes:
        name: Name of the run; its files are in `run.dir`/`run.name`.
        dir: Folder that holds all runs.
    """

    name: str = "unnamed"
    dir: str = "runs"


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism; dp · ep · tp must equal the number of ranks.

    Attributes:
        dp: Data-parallel degree, or `auto`: the world size divided by ep · tp.
        ep: Expert-parallel degree; divides `model.num_experts`.
        tp: Tensor-parallel degree: ranks that share the heads, the vocabulary and the positions of each row; divides
            model.num_heads and data.seq_length.
        dp_replicate: Number of model replicas inside dp (HSDP); divides dp.
        expert_tp: Ranks that share one expert's width: 1, where each tp rank's tokens meet whole experts, or tp, for
            experts too large for one GPU.
    """

    dp: int | Literal["auto"] = AUTO
    ep: int = 1
    tp: int = 1
    dp_replicate: int = 1
    expert_tp: int = 1


@dataclass(frozen=True)
class ModelConfig:
    """A Mixtral-type decoder. The defaults are Mixtral-8x7B's.

    Attributes:
        num_layers: Decoder blocks.
        hidden_size: Model width D.
        intermediate_size: Width F of one expert.
        num_heads: Query heads H.
        num_kv_heads: Key and value heads; divides num_heads.
        head_dim: Width of one head, or null for hidden_size / num_heads; even, for RoPE.
        num_experts: Experts E per layer.
        top_k: Experts per token K; at least 2 where there are several, because their weights sum to 1.
        vocab_size: Rows of the embedding; at least the tokenizer's.
        max_positions: Longest sequence the model is meant for, in tokens.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square in RMSNorm.
        tie_embeddings: Use the embedding as the output head.
        qk_norm: Normalise queries and keys per head, as Qwen3 does.
        init_std: Standard deviation of the initial weights; attention output and expert down projections
            are drawn with init_std / sqrt(2 · num_layers).
    """

    num_layers: int = 32
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int | None = None
    num_experts: int = 8
    top_k: int = 2
    vocab_size: int = 32000
    max_positions: int = 32768
    rope_theta: float = 1e6
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qk_norm: bool = False
    init_std: float = 0.02

    @property
    def resolved_head_dim(self) -> int:
        """Width of one attention head, in channels."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads


@dataclass(frozen=True)
class MoeConfig:
    """Routing and its losses.

    Attributes:
        aux_loss: `sequence` (balance within each row; the same at every layout), `global_batch` (balance over
            all data ranks of a micro-step; the same at every layout for a fixed accumulation) or `none`.
        aux_loss_coeff: Weight of each layer's load-balancing loss in the objective.
        z_loss_coeff: Weight of each layer's router z-loss, the mean squared logsumexp of the logits.
    """

    aux_loss: Literal["sequence", "global_batch", "none"] = "sequence"
    aux_loss_coeff: float = 1e-2
    z_loss_coeff: float = 0.0


@dataclass(frozen=True)
class ExpertsConfig:
    """How the experts are computed.

    Attributes:
        backend: `loop` (one expert after another: the reference), `grouped_mm` (torch's grouped matrix
            multiplication), `sequential` (one product after another; for a few large experts), `scaled_mm`
            (the same in FP8; CUDA only), `te` (Transformer Engine; CUDA only), or `auto`: the only one that can
            compute the shapes, or the fastest here; the choice is logged with its reason.
    """

    backend: Literal["auto", "loop", "grouped_mm", "sequential", "scaled_mm", "te"] = AUTO


@dataclass(frozen=True)
class DispatcherConfig:
    """How tokens reach their experts.

    Attributes:
        backend: `local` (ep = 1 only: no communication), `all_to_all`, or `auto`: local when ep = 1.
    """

    backend: Literal["auto", "local", "all_to_all"] = AUTO


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats.

    Attributes:
        mode: `fp32` or `bf16`: format of compute and of gathered parameters. `fp8_current`, `fp8_delayed`,
            `fp8_block` (Hopper), `mxfp8`, `nvfp4` (Blackwell): bf16, with the experts' products quantized, by
            Transformer Engine or, in fp8_current, by experts.backend=scaled_mm. `auto8`: mxfp8 on Blackwell,
            fp8_current on Hopper. `mxfp8_emulated`: MXFP8's rounding on any device, to study convergence. Master
            weights, optimizer states, the router, softmax and the sums of parameters' gradients are fp32 in every
            mode.
        bf16_first_layers: Blocks at the start that stay in bf16 in a quantized mode, which must leave some block to
            quantize.
        bf16_last_layers: The same at the end.
        attention: `bf16`, or `quantized`: the four projections of attention as well, in the FP8 modes with one
            scale per tensor, and in mxfp8_emulated with MXFP8's rounding. Needs torchao (the extra `mx`).
    """

    mode: Literal[
        "fp32",
        "bf16",
        "fp8_current",
        "fp8_delayed",
        "fp8_block",
        "mxfp8",
        "nvfp4",
        "mxfp8_emulated",
        "auto8",
    ] = "bf16"
    bf16_first_layers: int = 0
    bf16_last_layers: int = 0
    attention: Literal["bf16", "quantized"] = "bf16"


@dataclass(frozen=True)
class DataConfig:
    """The sequences and how they become rows.

    Attributes:
        path: A FASTA file, plain or .gz; the prefix of Megatron-Core's token files, PREFIX.bin and PREFIX.idx; several
            of one kind with weights, '0.7 /data/a 0.3 /data/b'; null for the E. coli W3110 genome inside the `demo`
            extra.
        seq_length: Tokens in one row, and the longest window of a sequence.
        stride: FASTA only: tokens by which consecutive windows of a long sequence overlap, the meaning that Hugging
            Face's tokenizers give the word; 0 means that every base is a target once per epoch.
        reverse_complement: FASTA only: read each row from the other strand with probability one half, decided by
            (seed, epoch, sample).
        separate_documents: Token files only: keep the documents of a row apart, in attention and positions, without
            a target across the border. false: a row is one stream, which needs no mask.
        heldout_fraction: Share of all tokens, at the end of each file, that training never sees; evaluated.
        prefetch: Micro-batches prepared ahead by a background thread; 0 for none and no thread.
    """

    path: str | None = None
    seq_length: int = 8192
    stride: int = 0
    reverse_complement: bool = False
    separate_documents: bool = True
    heldout_fraction: float = 0.05
    prefetch: int = 2


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with fp32 master weights, and a schedule with warmup.

    Attributes:
        lr: Peak learning rate.
        schedule: Of the learning rate after the warmup: `cosine` or `linear` down to min_lr at train.max_steps,
            `constant` at lr, or `wsd` (warmup, stable, decay): lr until the last decay_steps steps, then linear.
        min_lr: Learning rate at the last step; unused by `constant`.
        warmup_steps: Steps of linear warmup from 0 to lr.
        decay_steps: `wsd` only, where it must be set: steps of the fall from lr to min_lr at the end of the run.
        weight_decay: Decoupled decay of matrices; norms and other vectors are not decayed.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        clip_norm: Largest global gradient norm (L2); 0 turns clipping off.
    """

    lr: float = 1e-4
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    min_lr: float = 1e-5
    warmup_steps: int = 500
    decay_steps: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0


@dataclass(frozen=True)
class TrainConfig:
    """The training loop.

    Attributes:
        max_steps: Optimizer steps of the whole run.
        global_batch_size: Sequences (rows) per optimizer step, over all ranks.
        micro_batch_size: Sequences (rows) per rank and forward pass; accumulation is derived and must be whole.
        seed: Seed of the initial weights and of the data order.
        activation_checkpointing: `none`; `selective` (keep matrix products, attention and routing, recompute
            the rest); `full` (keep each block's input and its routing choice only). With `compile`, `selective`
            recomputes attention's four projections as well.
        compile: Compile attention (not the norms before it and before the experts), the loss and the optimizer's
            update with torch.compile; routing stays eager.
        deterministic: Refuse operations that are not bit-reproducible (on GPU; CPU runs are reproducible anyway).
        dry_run: Validate, print the resolved configuration and the sizes, and stop before training.
        max_nonfinite_steps: Consecutive steps with a non-finite loss or gradient norm, each skipped, after
            which the run stops.
        loss_spike_sigmas: Warn of a loss that many standard deviations above the mean of the last 100 steps; 0 for no
            warning.
        log_every: Steps between progress lines and TensorBoard points; metrics.jsonl has every step.
    """

    max_steps: int = 1000
    global_batch_size: int = 256
    micro_batch_size: int = 1
    seed: int = 0
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    compile: bool = False
    deterministic: bool = False
    dry_run: bool = False
    max_nonfinite_steps: int = 3
    loss_spike_sigmas: float = 6.0
    log_every: int = 10


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on the held-out region.

    Attributes:
        every: Steps between evaluations; 0 evaluates at the end only.
        max_rows: Rows of the held-out region to use while training; 0 for all. The last one uses all.
    """

    every: int = 0
    max_rows: int = 64


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving, keeping and resuming.

    Attributes:
        ckpt_dir: Folder of the steps and of `latest`; null for `run.dir`/`run.name`/checkpoints.
        every: Steps between saves; the last step is always saved. 0 saves at the end only.
        keep: Complete steps to keep, the newest first; 0 keeps all.
        async_save: Write in the background while training goes on.
        max_failed_saves: Saves in a row that may fail, or be left out because the one before is still being written,
            before the run stops; the last save of a run must succeed.
        resume: `auto` (from the latest complete step of ckpt_dir, if there is one), `never` (refused when
            ckpt_dir has a complete step), or a path: of a step folder, or of a folder of steps, whose newest complete
            step it then is.
        init_from: Weights that start a new run at step 0, without optimizer or data position: a step folder, a
            Hugging Face folder, or a Megatron-Core checkpoint.
    """

    ckpt_dir: str | None = None
    every: int = 100
    keep: int = 2
    async_save: bool = True
    max_failed_saves: int = 3
    resume: str = AUTO
    init_from: str | None = None


@dataclass(frozen=True)
class ResilienceConfig:
    """What happens when ranks hang, die or are told to stop.

    Attributes:
        hang_timeout_s: Seconds without progress on a rank, be it one layer, after which every rank writes what it
            was doing to `run.dir`/`run.name`/hang; 0 for no such watch. Longer than the first step takes to compile.
        abort_on_hang: End the ranks after the report, so that a launcher can start them again.
        heartbeat: `auto` (where NVRx's ft_launcher started the ranks), `nvrx`, or `off`: tell the launcher's monitor
            that the rank is alive, so that it can end and restart a hung one.
        max_failures_per_step: Starts in a row that may die in the same step before the next one refuses to go on.
    """

    hang_timeout_s: float = 900.0
    abort_on_hang: bool = True
    heartbeat: Literal["auto", "nvrx", "off"] = AUTO
    max_failures_per_step: int = 3


@dataclass(frozen=True)
class HardwareConfig:
    """The machine that a configuration is for.

    Attributes:
        target: `auto` for this one; with `train.dry_run=true`, validate for another: `cpu`, `a100`, `h100`,
            `h200`, `b200` (the number of ranks is then taken from the degrees, not from the launcher).
    """

    target: Literal["auto", "cpu", "a100", "h100", "h200", "b200"] = AUTO


@dataclass(frozen=True)
class Config:
    """The whole configuration.

    Attributes:
        device: `cpu` (gloo), `cuda` (NCCL), or `auto`: CUDA where there is one.
    """

    device: Literal["auto", "cpu", "cuda"] = AUTO
    run: RunConfig = field(default_factory=RunConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    dispatcher: DispatcherConfig = field(default_factory=DispatcherConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
