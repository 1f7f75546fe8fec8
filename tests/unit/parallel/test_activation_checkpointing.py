import pytest
import torch
from torch import Tensor

from moe_framework.data.loader import Batch
from moe_framework.model.decoder import Decoder
from moe_framework.moe.experts.choose import BACKENDS
from moe_framework.moe.experts.layer import GroupedExperts
from moe_framework.moe.router import TopKRouter
from moe_framework.parallel.activation_checkpointing import apply_activation_checkpointing
from moe_framework.train.step import Objective, StepCounts, accumulate_gradients, forward
from tests.unit.model.builders import plain_decoder, random_batch


@pytest.fixture
def batch() -> Batch:
    return random_batch(0, [[24], [10, 7], [13]], seq_length=24)


def checkpointed(mode: str, backend: str = "grouped_mm") -> Decoder:
    model = plain_decoder(backend=backend)
    apply_activation_checkpointing(model, mode)
    return model


def gradients(model: Decoder, batch: Batch) -> dict[str, Tensor]:
    counts = StepCounts(batch.num_targets, batch.num_tokens)
    accumulate_gradients(model, [batch], counts, Objective(0.01, 0.001))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_no_bit(mode: str, backend: str, batch: Batch):
    expected = gradients(checkpointed("none", backend), batch)
    actual = gradients(checkpointed(mode, backend), batch)
    assert actual.keys() == expected.keys() == dict(plain_decoder().named_parameters()).keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_parameter_names_stay(mode: str):
    names = [name for name, _ in plain_decoder().named_parameters()]
    assert [name for name, _ in checkpointed(mode).named_parameters()] == names


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_reuses_the_choice_where_it_would_now_choose_otherwise(mode: str, batch: Batch):
    model = checkpointed(mode)
    seen: list[list[list[int]]] = []
    experts = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    for layer in experts:
        calls: list[list[int]] = []
        seen.append(calls)
        backend = layer.backend

        def recording(gate_up, down, rows_RD, probs_R, tokens_per_expert, calls=calls, backend=backend):
            calls.append(tokens_per_expert.tolist())
            return backend(gate_up, down, rows_RD, probs_R, tokens_per_expert)

        layer.backend = recording
    out = forward(model, batch)
    for router in routers:
        router.weight.data.neg_()
    out.loss.backward()
    for calls, counts in zip(seen, out.tokens_per_expert_LE.tolist(), strict=True):
        assert calls == [counts, counts]
    assert forward(model, batch).tokens_per_expert_LE.tolist() != out.tokens_per_expert_LE.tolist()


@pytest.mark.parametrize(("mode", "share"), [("selective", 1.0), ("full", 1 / 3)])
def test_less_is_kept_for_backward(mode: str, share: float, batch: Batch):
    def kept_bytes(model: Decoder) -> int:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward(model, batch)
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        return sum(size for pointer, size in kept.items() if pointer not in parameters)

    assert kept_bytes(checkpointed(mode)) < share * kept_bytes(checkpointed("none"))
