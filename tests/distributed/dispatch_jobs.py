"""One MoE exchange on the ranks of an expert-parallel group, and the same on one process."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_framework.moe.dispatch.all_to_all import AllToAllDispatcher
from moe_framework.moe.dispatch.base import TokenDispatcher
from moe_framework.moe.dispatch.local import LocalDispatcher
from moe_framework.moe.experts.loop import loop_experts

E, K, D, WIDTH = 8, 2, 6, 5


@dataclass(frozen=True)
class Exchange:
    """The inputs of one exchange.

    Attributes:
        tokens: Tokens of each rank.
        allowed: Experts that may be chosen.
        seed: Of everything.
    """

    tokens: tuple[int, ...]
    allowed: tuple[int, ...]
    seed: int = 0

    def __str__(self) -> str:
        return f"tokens={self.tokens}-experts={self.allowed}"


@dataclass
class Tensors:
    """Inputs, output and gradients of one exchange.

    Attributes:
        y: Output.
        x_grad: Gradient of the tokens.
        probs_grad: Gradient of the routing weights.
        gate_up_grad: Gradient of the experts.
        down_grad: Gradient of the experts.
        tokens_per_expert: Rows of each expert.
    """

    y: Tensor
    x_grad: Tensor
    probs_grad: Tensor
    gate_up_grad: Tensor
    down_grad: Tensor
    tokens_per_expert: Tensor


def inputs_of(exchange: Exchange) -> dict[str, Tensor]:
    """Draw the inputs of all ranks, in float64."""
    generator = torch.Generator().manual_seed(exchange.seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    total = sum(exchange.tokens)
    scores = torch.rand(total, len(exchange.allowed), generator=generator)
    return {
        "x": randn(total, D),
        "probs": randn(total, K),
        "experts": torch.tensor(exchange.allowed)[scores.topk(K).indices],
        "cotangent": randn(total, D),
        "gate_up": randn(E, 2 * WIDTH, D),
        "down": randn(E, D, WIDTH),
    }


def compute(dispatcher: TokenDispatcher, inputs: dict[str, Tensor]) -> Tensors:
    """Dispatch, apply the experts, combine, and go back."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("x", "probs", "gate_up", "down")}
    sent = dispatcher.dispatch(leaves["x"], leaves["probs"], inputs["experts"])
    rows = loop_experts(leaves["gate_up"], leaves["down"], sent.rows_RD, sent.probs_R, sent.tokens_per_expert)
    y = dispatcher.combine(rows, sent.handle)
    y.backward(inputs["cotangent"])
    gradients = {f"{name}_grad": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return Tensors(y=y.detach(), tokens_per_expert=sent.tokens_per_expert, **gradients)


def on_one_process(exchange: Exchange) -> Tensors:
    """The reference: every token and every expert here."""
    return compute(LocalDispatcher(num_experts=E), inputs_of(exchange))


def on_this_rank(exchange: Exchange, num_exchanges: int = 1) -> Tensors:
    """This rank's tokens and experts, exchanged with the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = inputs_of(exchange)
    start = sum(exchange.tokens[:rank])
    own_tokens = slice(start, start + exchange.tokens[rank])
    own_experts = slice(rank * E // size, (rank + 1) * E // size)
    for name in ("x", "probs", "experts", "cotangent"):
        inputs[name] = inputs[name][own_tokens]
    for name in ("gate_up", "down"):
        inputs[name] = inputs[name][own_experts]
    group = dist.group.WORLD
    assert group is not None
    dispatcher = AllToAllDispatcher(num_experts=E, group=group)
    results = [compute(dispatcher, inputs) for _ in range(num_exchanges)]
    return results[-1]


def two_in_flight(first: Exchange, second: Exchange) -> bool:
    """Dispatch twice before combining; whether both come back unmixed."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    dispatcher = AllToAllDispatcher(num_experts=E, group=group)
    own = []
    for exchange in (first, second):
        start = sum(exchange.tokens[:rank])
        place = slice(start, start + exchange.tokens[rank])
        inputs = inputs_of(exchange)
        own.append((inputs["x"][place], inputs["probs"][place], inputs["experts"][place]))
    sent = [dispatcher.dispatch(*tensors) for tensors in own]
    back = [dispatcher.combine(s.rows_RD, s.handle) for s in sent]
    return all(torch.allclose(y, K * tensors[0]) for y, tensors in zip(back, own, strict=True))
