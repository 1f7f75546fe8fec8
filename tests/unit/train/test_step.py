from collections.abc import Iterator

import numpy as np
import pytest
import torch

from moe_framework.data.loader import Batch, collate
from moe_framework.distributed.mesh import ParallelMesh, build_mesh
from moe_framework.errors import DataError
from moe_framework.optim.adamw import build_adamw
from moe_framework.train import step as step_module
from moe_framework.train.step import (
    Objective,
    StepCounts,
    _to_host,
    accumulate_gradients,
    agree_on_counts,
    forward,
    train_step,
)
from tests.helpers.one_rank import one_rank
from tests.unit.model.builders import SMALL, plain_decoder, random_row, relative_difference

OBJECTIVE = Objective(aux_loss_coeff=0.02, z_loss_coeff=0.01)
ROWS = [[24], [10, 7], [3], [11, 2, 1]]


@pytest.fixture(scope="module")
def mesh() -> Iterator[ParallelMesh]:
    with one_rank():
        yield build_mesh("cpu", dp=1, ep=1)


def batch_of(*index: int) -> Batch:
    """The rows with these numbers, of which some are padded, as one batch."""
    rng = np.random.default_rng(5)
    rows = [random_row(rng, lengths, 24, SMALL.vocab_size) for lengths in ROWS]
    return collate([rows[i] for i in index], index)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_counts_are_summed_over_micro_batches(mesh: ParallelMesh):
    batches = [batch_of(0, 1), batch_of(2, 3)]
    counts = agree_on_counts(batches, mesh.data_group)
    assert counts == (sum(b.num_targets for b in batches), 24 + 17 + 3 + 14, False)


def test_counts_of_padding_alone_can_divide(mesh: ParallelMesh):
    rng = np.random.default_rng(0)
    assert agree_on_counts([collate([random_row(rng, [], 24, 13)], (0,))], mesh.data_group) == (1, 1, False)


def test_a_rank_that_was_told_to_stop_says_so_with_its_counts(mesh: ParallelMesh):
    assert agree_on_counts([batch_of(0, 1)], mesh.data_group, stop=True).stop


def test_the_loaders_error_is_raised_as_it_is(mesh: ParallelMesh):
    error = DataError("data.path=/x.fa: ended early.")
    with pytest.raises(DataError) as caught:
        agree_on_counts(error, mesh.data_group)
    assert caught.value is error


def test_two_micro_batches_have_the_gradients_of_the_objective_on_one_batch():
    whole, halves = batch_of(0, 1, 2, 3), [batch_of(0, 1), batch_of(2, 3)]
    counts = StepCounts(whole.num_targets, whole.num_tokens)
    expected, model = plain_decoder(), plain_decoder()
    out = forward(expected, whole)
    (out.loss / counts[0] + (0.02 * out.aux_loss + 0.01 * out.z_loss) / counts[1]).backward()
    totals = accumulate_gradients(model, halves, counts, OBJECTIVE)
    wanted, found = gradients(expected), gradients(model)
    assert found.keys() == wanted.keys() == dict(model.named_parameters()).keys()
    assert max(relative_difference(found[name], wanted[name]) for name in wanted) < 1e-5
    for name in ("loss", "aux_loss", "z_loss", "entropy_L"):
        assert not getattr(totals, name).requires_grad
        torch.testing.assert_close(getattr(totals, name), getattr(out, name).detach(), rtol=1e-5, atol=0)
    assert torch.equal(totals.tokens_per_expert_LE, out.tokens_per_expert_LE)


def test_step_reports_means_and_clears_gradients(mesh: ParallelMesh):
    model, batch = plain_decoder(), batch_of(0, 1, 2, 3)
    with torch.no_grad():
        out = forward(model, batch)
    counts = agree_on_counts([batch], mesh.data_group)
    optimizer = build_adamw(model, lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
    result = train_step(model, optimizer, [batch], counts, mesh=mesh, objective=OBJECTIVE, clip_norm=1.0)
    assert result.applied
    assert result.loss == pytest.approx(out.loss.item() / batch.num_targets, rel=1e-6)
    # Per token and layer, so that balanced routing gives an auxiliary loss of one at any depth.
    assert result.aux_loss == pytest.approx(out.aux_loss.item() / batch.num_tokens / SMALL.num_layers, rel=1e-6)
    assert result.z_loss == pytest.approx(out.z_loss.item() / batch.num_tokens / SMALL.num_layers, rel=1e-6)
    assert 0.9 < result.aux_loss < 2
    assert all(p.grad is None for p in model.parameters())


def test_nothing_of_a_step_waits_for_its_update(mesh: ParallelMesh, monkeypatch: pytest.MonkeyPatch):
    model, batch, done = plain_decoder(), batch_of(0, 1, 2, 3), []
    counts = agree_on_counts([batch], mesh.data_group)
    optimizer = build_adamw(model, lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)

    def told(name: str, real):
        return lambda *args: (done.append(name), real(*args))[1]

    monkeypatch.setattr(step_module, "all_reduce_sum", told("sum", step_module.all_reduce_sum))
    monkeypatch.setattr(step_module, "_to_host", told("wait", _to_host))
    monkeypatch.setattr(optimizer, "step_clipped", told("update", optimizer.step_clipped))
    result = train_step(model, optimizer, [batch], counts, mesh=mesh, objective=OBJECTIVE, clip_norm=1.0)
    assert done == ["sum", "sum", "sum", "wait", "update"]
    assert result.tokens_per_expert_LE.sum() == batch.num_tokens * SMALL.top_k * SMALL.num_layers


def test_figures_come_to_the_host_bit_for_bit():
    scalars = torch.tensor([1 / 3, float("nan"), float("-inf"), 1e-40, 3e38])
    counts = torch.tensor([[2**53 - 1, 0], [1, 2**31 + 1]])
    found = _to_host(scalars, counts, scalars[:1])
    for one, expected in zip(found, (scalars, counts, scalars[:1]), strict=True):
        assert one.dtype == expected.dtype
        torch.testing.assert_close(one, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("part", ["loss", "aux_loss", "z_loss", "gradient"])
def test_a_non_finite_step_leaves_weights_and_optimizer_bit_for_bit(mesh: ParallelMesh, part: str):
    model, batch = plain_decoder(), batch_of(0, 1, 2, 3)
    counts = agree_on_counts([batch], mesh.data_group)
    optimizer = build_adamw(model, lr=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)

    def step():
        return train_step(model, optimizer, [batch], counts, mesh=mesh, objective=OBJECTIVE, clip_norm=1.0)

    def state() -> list[torch.Tensor]:
        moments = [value for p in model.parameters() for value in optimizer.state[p].values()]
        return [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]

    step()
    before = state()
    if part == "gradient":
        handle = model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    else:
        handle = model.register_forward_hook(lambda _, __, out: out._replace(**{part: getattr(out, part) * torch.inf}))
    result = step()
    assert not result.applied
    assert all(torch.equal(one, other) for one, other in zip(state(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    assert step().applied
    assert not all(torch.equal(one, other) for one, other in zip(state(), before, strict=True))
