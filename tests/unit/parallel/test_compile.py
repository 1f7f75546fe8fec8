"""What torch.compile really compiles: a module that is told to compile and does not says nothing."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from moe_framework.optim.adamw import build_adamw
from moe_framework.parallel.compile import compile_blocks
from moe_framework.train.step import Objective, StepCounts, accumulate_gradients
from tests.unit.model.builders import SMALL, plain_decoder, random_batch

OPERATION_OF_PART = {"attention": "scaled_dot_product_attention", "loss": "cross_entropy", "optimizer": "addcdiv_"}


def parts_of(graph: GraphModule) -> list[str]:
    """The parts whose operation a graph has."""
    names = {getattr(node.target, "__name__", str(node.target)) for node in graph.graph.nodes}
    return [part for part, operation in OPERATION_OF_PART.items() if operation in names]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GraphModule]]:
    """Every graph that torch.compile is given from here on; it runs as it is."""
    seen: list[GraphModule] = []

    def record(graph: GraphModule, _inputs: list[Tensor]) -> Callable:
        seen.append(graph)
        return graph.forward

    def compile_with_record(function: Callable, *, dynamic: bool | None = None, **_options: object) -> Callable:
        return real(function, dynamic=dynamic, backend=record)

    real = torch.compile
    monkeypatch.setattr(torch, "compile", compile_with_record)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


def test_attention_loss_and_optimizer_are_the_graphs_and_nothing_else_is(graphs: list[GraphModule]):
    model = plain_decoder(replace(SMALL, num_layers=1))
    compile_blocks(model)
    batch = random_batch(0, [[24], [10, 7]], seq_length=24)
    accumulate_gradients(model, [batch], StepCounts(batch.num_targets, batch.num_tokens), Objective(0.01, 0.001))
    optimizer = build_adamw(model.norm, lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, compiled=True)
    optimizer.step_clipped(torch.tensor(2.0), 1.0)
    found = [parts_of(graph) for graph in graphs]
    assert {part for parts in found for part in parts} == OPERATION_OF_PART.keys()
    assert all(len(parts) == 1 for parts in found), found


def test_a_norm_of_torch_is_not_compiled_by_being_told_to(graphs: list[GraphModule]):
    """Should torch compile it one day, this test says so, and the norms are worth another look."""
    norm = torch.nn.RMSNorm(8)
    norm.compile()
    norm(torch.randn(2, 8))
    assert graphs == []
