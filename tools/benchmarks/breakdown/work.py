"""What each part of a step has to do at the least, by formula from the configuration: operations or bytes."""

from dataclasses import dataclass

from moe_framework.config.schema import Config
from tools.benchmarks.breakdown import ranges

BF16, FP32 = 2, 4


@dataclass(frozen=True)
class Work:
    """The work of one part, of one rank and step.

    Attributes:
        amount: FLOP, or bytes read and written, or bytes sent.
        unit: `FLOP`, `bytes` or `bytes sent`.
        formula: How it was counted.
        fp8: Whether the experts' FP8 rate is the limit.
    """

    amount: float
    unit: str
    formula: str
    fp8: bool = False


def work_of_parts(config: Config, num_ranks: int) -> dict[str, Work]:
    """Count the work of each part for even routing and rows without padding.

    Args:
        config: Validated.
        num_ranks: Ranks.

    Returns:
        By the names of `ranges.PARTS`.
    """
    sizes, ep = config.model, config.parallel.ep
    layers, width, heads = sizes.num_layers, sizes.hidden_size, sizes.num_heads * sizes.resolved_head_dim
    kv_heads, length = sizes.num_kv_heads * sizes.resolved_head_dim, config.data.seq_length
    tokens = config.train.global_batch_size * length / num_ranks
    copies = tokens * sizes.top_k
    projections = 2 * width * (heads + kv_heads)
    expert_parameters = layers * sizes.num_experts * 3 * width * sizes.intermediate_size
    embeddings = sizes.vocab_size * width * (1 if sizes.tie_embeddings else 2)
    dense_parameters = layers * (projections + width * sizes.num_experts) + embeddings
    own = (expert_parameters + dense_parameters) / num_ranks
    # Experts that a rank has to itself are not FSDP's.
    sharded_experts = 0 if config.parallel.dp == 1 else expert_parameters
    sharded = (sharded_experts + dense_parameters) / num_ranks
    gathered = sharded_experts / ep + dense_parameters
    gemm = 18.0 * copies * width * sizes.intermediate_size * layers
    quantized = config.precision.mode.startswith(("fp8", "mxfp8", "auto8")) and "emulated" not in config.precision.mode
    work = {
        ranges.EXPERTS: Work(gemm, "FLOP", "18·T·K·D·F·L", fp8=quantized),
        ranges.ROUTER: Work(
            layers * tokens * width * BF16 * 3, "bytes", "L·(read x; in backward read x, write its gradient)"
        ),
        ranges.PERMUTATION: Work(
            layers * (6 * copies + 2 * tokens) * width * BF16,
            "bytes",
            "L·2·(read and write N rows; read N, write T rows)",
        ),
        ranges.ATTENTION: Work(
            layers * (6.0 * tokens * projections + 6.0 * heads * length * tokens),
            "FLOP",
            "L·(6·T·projections + 6·H·S·T, causal)",
        ),
        ranges.HEAD: Work(6.0 * tokens * width * sizes.vocab_size, "FLOP", "6·T·D·V"),
        ranges.OPTIMIZER: Work(
            own * 8 * FP32, "bytes", "8 fp32 values per own parameter: norm 1, AdamW 7, the factor of clipping fused"
        ),
        ranges.SHARDING: Work(
            sharded * 3 * FP32 + gathered * 3 * BF16,
            "bytes",
            "of what FSDP shards: per own parameter read twice, write gradient, fp32; per gathered one write twice, "
            "read gradient, bf16",
        ),
        ranges.OTHER: Work(
            layers * 22 * tokens * width * BF16, "bytes", "L·22·T·D: 2 norms (2 + 3 each), 2 residual sums (3 + 3 each)"
        ),
    }
    if ep > 1:
        work[ranges.EXCHANGE] = Work(
            layers * 4 * copies * width * BF16 * (ep - 1) / ep, "bytes sent", "4·L·N·D·(ep−1)/ep, bf16"
        )
    return work
