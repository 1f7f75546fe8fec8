"""Bytes of one layer's activations, and of the logits.

Letters: B·S tokens of a data rank's micro-batch, T = B·S/tp of the rank's own, R = T·K·expert_tp rows at its experts
(even load), D, F, E, V as everywhere with F and V the rank's parts, q and k the channels of its query heads and of its
key heads, c bytes of the compute format.
"""

from dataclasses import dataclass

from moe_framework.planning.job import Job

# Of an expert choice: its number (int64) and its logit (fp32).
_BYTES_OF_CHOICE = 12
# Of a token copy: its places in both orders (int64), and its weight in both (fp32).
_BYTES_OF_PLACE = 24
# Scores, probabilities, choices and the softmax's gradient over all experts, fp32.
_BYTES_OF_SCORES = 16
_FP32 = 4


@dataclass(frozen=True)
class LayerActivations:
    """What autograd keeps of a layer without activation checkpointing, in bytes.

    Attributes:
        attention: Input, its norm, queries, keys, values, output: c·(T·D + B·S·(D + 2·q + 2·k)) + 4·B·S·H/tp; with
            qk_norm c·B·S·(q + k) more. Under a mask each query head has keys and values of its own: k = q.
        router: Input of the norm, c·T·D; of the router in fp32, 4·T·D; scores 16·T·E; orders 24·R.
        rows: The experts' input, c·R·D; 1 byte each where they are quantized.
        gate_up: c·R·2F.
        hidden: c·R·F; 1 byte each where they are quantized.
    """

    attention: int
    router: int
    rows: int
    gate_up: int
    hidden: int

    @property
    def outside_experts(self) -> int:
        """All but the experts' own."""
        return self.attention + self.router

    @property
    def experts(self) -> int:
        """The experts' own."""
        return self.rows + self.gate_up + self.hidden

    @property
    def total(self) -> int:
        """All of it."""
        return self.outside_experts + self.experts


def layer_activations(job: Job, *, quantized: bool) -> LayerActivations:
    """Compute the bytes of one layer; see `LayerActivations`."""
    c, value = job.compute_bytes, 1 if quantized else job.compute_bytes
    queries, keys = _attention_widths(job)
    normed = queries + _key_width(job) if job.qk_norm else 0
    attention = c * (
        job.tokens * job.hidden_size + job.row_tokens * (job.hidden_size + 2 * queries + 2 * keys + normed)
    )
    router = (c + _FP32) * job.hidden_size + _BYTES_OF_SCORES * job.num_experts
    return LayerActivations(
        attention=attention + _softmax_sums(job),
        router=job.tokens * router + _BYTES_OF_PLACE * job.expert_rows,
        rows=value * job.expert_rows * job.hidden_size,
        gate_up=c * job.expert_rows * 2 * job.expert_width,
        hidden=value * job.expert_rows * job.expert_width,
    )


def kept_activations(job: Job, *, quantized: bool) -> int:
    """Compute what a layer keeps between its forward and its backward pass.

    - `none`: all of `LayerActivations`.
    - `full`: the block's input, c·T·D, and the choices, 12·T·K.
    - `selective`: that, scores 4·T·E; attention's output c·B·S·q + 4·B·S·H/tp; its projections c·B·S·(q + 2·k + D)
      where it is not compiled; the experts' products c·R·(2F + D); exchanges: 2·c·T·K·D between the ranks of ep,
      2·c·R·D between those of expert_tp, c·(B·S + T)·D between those of tp.
    - Transformer Engine's experts keep in every mode what they keep in `none`.
    """
    whole = layer_activations(job, quantized=quantized)
    if job.activation_checkpointing == "none":
        return whole.total
    c, width = job.compute_bytes, job.hidden_size
    kept = c * job.tokens * width + _BYTES_OF_CHOICE * job.tokens * job.top_k
    kept += 0 if job.experts_are_recomputed else whole.experts
    if job.activation_checkpointing == "full":
        return kept
    queries = _attention_widths(job)[0]
    kept += _FP32 * job.tokens * job.num_experts + c * job.row_tokens * queries + _softmax_sums(job)
    if not job.compiled:
        kept += c * job.row_tokens * (queries + 2 * _key_width(job) + width)
    if job.experts_are_recomputed:
        kept += c * job.expert_rows * (2 * job.expert_width + width)
    if job.ep > 1:
        kept += 2 * c * job.tokens * job.top_k * width
    if job.expert_tp > 1:
        kept += 2 * c * job.expert_rows * width
    if job.tp > 1:
        kept += c * (job.row_tokens + job.tokens) * width
    return kept


def mask_bytes(job: Job) -> int:
    """Compute the attention mask that all layers share: c·B·S², where a row may hold several documents."""
    return job.compute_bytes * job.row_tokens * job.seq_length if job.masked else 0


def head_activations(job: Job) -> int:
    """Compute the last norm's input and output, which the head reads: c·(T + B·S)·D."""
    return job.compute_bytes * (job.tokens + job.row_tokens) * job.hidden_size


def loss_bytes(job: Job) -> int:
    """Compute logits, their gradient and what lies between, at the worst moment.

    Compiled, without tp: 2·c·B·S·V, the logits and their gradient. Eager: 12·B·S·V, the log-softmax and two gradients
    in fp32. With tp (never compiled): (c + 12)·B·S·V.
    """
    c, logits = job.compute_bytes, job.row_tokens * job.vocabulary_part
    if job.tp > 1:
        return (c + 3 * _FP32) * logits
    return 2 * c * logits if job.compiled else 3 * _FP32 * logits


def _attention_widths(job: Job) -> tuple[int, int]:
    """Channels of the rank's queries, and of the keys that attention keeps."""
    queries = job.num_heads * job.head_dim // job.tp
    return queries, queries if job.masked else _key_width(job)


def _key_width(job: Job) -> int:
    return max(job.num_kv_heads // job.tp, 1) * job.head_dim


def _softmax_sums(job: Job) -> int:
    return _FP32 * job.row_tokens * job.num_heads // job.tp
