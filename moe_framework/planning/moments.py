"""What a rank holds on top of weights and moments, at each moment of a step that may be its fullest.

In forward nothing is freed, so the loss is its fullest moment. In backward each layer gives up its activations and
leaves gradients, 4 bytes a parameter; while its experts are differentiated, buffers as large as their activations are
alive besides. W is a rank's experts of one layer before FSDP shards them, n the ranks that share them, c bytes of the
compute format, g bytes of a weight's gradient as it is computed: 4 where one rank holds its experts alone and writes
the parameter's own, else c.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from moe_framework.planning.activations import (
    LayerActivations,
    head_activations,
    kept_activations,
    layer_activations,
    loss_bytes,
    mask_bytes,
)
from moe_framework.planning.job import Job
from moe_framework.planning.parameters import BYTES_OF_GRADIENT, gathered_parameters, local_parameters


@dataclass(frozen=True)
class Moment:
    """Bytes alive at one moment, on top of weights and moments.

    Attributes:
        name: When it is.
        gradients: Of parameters whose gradient is complete, or kept from earlier micro-batches.
        copies: Of experts' weights in the compute format or quantized, from forward to backward.
        gathered: Weights that FSDP has gathered, and those that it gathers meanwhile.
        activations: What autograd keeps.
        working: Logits, gradients of activations, gradients of weights on their way.
    """

    name: str
    gradients: int = 0
    copies: int = 0
    gathered: int = 0
    activations: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.gradients + self.copies + self.gathered + self.activations + self.working


def moments(job: Job) -> Iterator[Moment]:
    """Yield the moments of a step, in their order.

    Args:
        job: The run.
    """
    c = job.compute_bytes
    head = gathered_parameters(job, "embedding" if job.tie_embeddings else "head")
    kept = [kept_activations(job, quantized=layer in job.quantized_layers) for layer in range(job.num_layers)]
    copies = [_kept_copies(job, layer) for layer in range(job.num_layers)]
    common = mask_bytes(job)
    every_gradient = BYTES_OF_GRADIENT * local_parameters(job)
    earlier = every_gradient if job.micro_steps > 1 else 0

    loss = {
        "gradients": earlier,
        "copies": sum(copies),
        "activations": common + sum(kept) + head_activations(job),
    }
    yield Moment("the loss", **loss, gathered=c * head, working=loss_bytes(job))
    logits = c * job.row_tokens * job.vocabulary_part
    yield Moment("the head's backward", **loss, gathered=c * head, working=logits + c * head)
    yield Moment("the sum of the head's gradient", **loss, working=_reduce_bytes(job, head, job.dp_shard * job.ep))

    block = BYTES_OF_GRADIENT * local_parameters(job, "block", "experts") // job.num_layers
    done = BYTES_OF_GRADIENT * local_parameters(job, "head")
    for layer in reversed(range(job.num_layers)):
        behind = sum(kept[:layer]) + common
        gradients = earlier or done + block * (job.num_layers - 1 - layer)
        yield from _layer_moments(job, layer, gradients, sum(copies[:layer]), behind)

    table = gathered_parameters(job, "embedding")
    tokens = (c + BYTES_OF_GRADIENT) * job.row_tokens * job.hidden_size
    yield Moment(
        "the embedding's backward",
        gradients=every_gradient,
        activations=common,
        working=tokens + (BYTES_OF_GRADIENT + c) * table,
    )
    yield Moment("the update", gradients=every_gradient)


def _layer_moments(job: Job, layer: int, gradients: int, copies: int, behind: int) -> Iterator[Moment]:
    """The backward pass of one layer: its experts, their sum over ranks, its attention.

    Args:
        job: The run.
        layer: Which.
        gradients: Bytes of gradients of the layers after it, and of the head.
        copies: Bytes of the copies of the layers before it.
        behind: Bytes of the activations of the layers before it.
    """
    c, quantized = job.compute_bytes, layer in job.quantized_layers
    weights = _experts_of_layer(job)
    acts = layer_activations(job, quantized=quantized)
    dense = c * gathered_parameters(job, "block") // job.num_layers * 2
    shared = not job.experts_are_alone
    outside = behind + acts.outside_experts
    ahead = c * weights if shared and layer else 0
    gathered = dense + (c * weights + ahead if shared else 0)
    own = round(_copy_bytes(job, layer) * weights)
    name = f"backward of layer {layer}'s experts"
    for experts, own_copies, working in _expert_steps(job, acts, own, weights, quantized=quantized):
        yield Moment(name, gradients, copies + own_copies, gathered, outside + experts, working)
    if shared:
        working = _reduce_bytes(job, weights, job.expert_shards)
        yield Moment(f"sum of layer {layer}'s expert gradients", gradients, copies, dense + ahead, outside, working)
    if job.micro_steps == 1:
        gradients += BYTES_OF_GRADIENT * local_parameters(job, "experts") // job.num_layers
    yield Moment(f"backward of layer {layer}'s attention", gradients, copies, dense + ahead, outside, acts.attention)


def _expert_steps(
    job: Job, acts: LayerActivations, copies: int, weights: int, *, quantized: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield (activations of the experts, their copies, working bytes) for the steps of their backward.

    - quantized, one function that keeps all to its end: 2·R·2F for the gradient of gate and up in 8 bits, as it is and
      transposed; 2·c·R·D; g·W.
    - otherwise down: c·R·(D + F) + g·W/3; SwiGLU: c·R·3F + g·W/3; gate and up: c·R·(2F + D) + g·W. Each frees what it
      read, the copies too.
    - the grouped kernel's gradients have the compute format, and alone on a rank are cast at the end: c·W + 4·2W/3.
    """
    c, rows, width, inner = job.compute_bytes, job.expert_rows, job.hidden_size, job.expert_width
    writes_own = job.experts_are_alone and (quantized or job.experts_kernel != "grouped")
    gradient = (BYTES_OF_GRADIENT if writes_own else c) * weights
    if quantized:
        yield acts.experts, copies, 2 * rows * 2 * inner + 2 * c * rows * width + gradient
        return
    yield acts.experts, copies, c * rows * (width + inner) + gradient // 3
    yield acts.rows + acts.gate_up, copies * 2 // 3, c * rows * 3 * inner + gradient // 3
    yield acts.rows, copies * 2 // 3, c * rows * (2 * inner + width) + gradient
    if job.experts_are_alone and not writes_own and c != BYTES_OF_GRADIENT:
        yield 0, 0, c * rows * width + gradient + BYTES_OF_GRADIENT * weights * 2 // 3


def _reduce_bytes(job: Job, weights: int, shards: int) -> int:
    """FSDP's sum of gradients: from the compute format into fp32, 4·W, and from there into the shard, 4·W/n."""
    return BYTES_OF_GRADIENT * weights + max(job.compute_bytes * weights, BYTES_OF_GRADIENT * weights // shards)


def _experts_of_layer(job: Job) -> int:
    return gathered_parameters(job, "experts") // job.num_layers


def _kept_copies(job: Job, layer: int) -> int:
    """Bytes of a layer's copies from its forward to its backward pass, unless they are made again there."""
    if job.activation_checkpointing != "none" and job.experts_are_recomputed:
        return 0
    return round(_copy_bytes(job, layer) * _experts_of_layer(job))


def _copy_bytes(job: Job, layer: int) -> float:
    """Bytes a parameter of the copies: quantized ones in any layout, those in bf16 where FSDP does not gather."""
    if layer in job.quantized_layers:
        return job.copy_bytes
    return job.compute_bytes if job.experts_are_alone and job.compute_bytes != BYTES_OF_GRADIENT else 0.0
