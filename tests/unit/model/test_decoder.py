from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_framework.data.loader import Batch, collate
from moe_framework.data.rows import Row
from moe_framework.model.decoder import Decoder
from moe_framework.train.step import Objective, StepCounts, accumulate_gradients, forward
from tests.unit.model.builders import SMALL, plain_decoder, random_batch, relative_difference


@pytest.fixture
def model() -> Decoder:
    return plain_decoder(replace(SMALL, init_std=0.3))


@pytest.fixture
def dense_model() -> Decoder:
    """Every token takes every expert, so that no token's bits depend on how many others share its experts' GEMMs."""
    return plain_decoder(replace(SMALL, init_std=0.3, top_k=SMALL.num_experts))


def logits_of(model: Decoder, batch: Batch) -> Tensor:
    out = model(batch.tokens, batch.positions, document_ids_BS=batch.document_ids, valid_index_T=batch.valid_index)
    assert out.logits_BSV is not None
    return out.logits_BSV.detach()


def document(batch: Batch, row: int, number: int) -> Batch:
    """One document of a packed row, as a batch of its own."""
    assert batch.document_ids is not None
    place = (batch.document_ids[row] == number).nonzero().flatten().numpy()
    tokens, targets = batch.tokens[row].numpy()[place], batch.targets[row].numpy()[place]
    ids = np.zeros(len(place), dtype=np.int64)
    return collate([Row(tokens, targets, np.arange(len(place)), ids, len(place))], (0,))


def test_a_document_is_bit_unchanged_by_the_others_of_its_row(dense_model: Decoder):
    batch = random_batch(0, [[7, 9, 5]], seq_length=24)
    before = logits_of(dense_model, batch)
    for changed in range(3):
        tokens = batch.tokens.clone()
        assert batch.document_ids is not None
        inside = batch.document_ids == changed
        tokens[inside] = (tokens[inside] + 3) % SMALL.vocab_size
        after = logits_of(dense_model, replace(batch, tokens=tokens))
        for other in {0, 1, 2} - {changed}:
            there = batch.document_ids == other
            assert torch.equal(before[there], after[there])
        assert not torch.equal(before[inside], after[inside])


def test_packed_documents_equal_separate_runs(model: Decoder):
    batch = random_batch(1, [[7, 9, 5], [24]], seq_length=24)
    assert batch.document_ids is not None
    packed = logits_of(model, batch)
    for row, number in [(0, 0), (0, 1), (0, 2), (1, 0)]:
        alone = logits_of(model, document(batch, row, number))[0]
        assert relative_difference(packed[row][batch.document_ids[row] == number], alone) <= 1e-6


def test_later_tokens_and_padding_change_nothing_before_them(dense_model: Decoder):
    batch = random_batch(2, [[20], [13]], seq_length=24)
    assert batch.document_ids is None
    before = logits_of(dense_model, batch)
    tokens = batch.tokens.clone()
    tokens[0, 12:] = 5
    tokens[1, 13:] = 7
    after = logits_of(dense_model, replace(batch, tokens=tokens))
    assert torch.equal(before[0, :12], after[0, :12])
    assert torch.equal(before[1, :13], after[1, :13])
    assert not torch.equal(before[0, 12:20], after[0, 12:20])


@pytest.mark.parametrize("num_layers", [1, 3])
def test_one_mask_is_kept_for_backward_whatever_the_number_of_layers(num_layers: int):
    model, masks = plain_decoder(replace(SMALL, num_layers=num_layers)), {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[-2:] == (24, 24):
            masks[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward(model, random_batch(7, [[7, 9, 5], [24]], seq_length=24))
    assert len(masks) == 1


def test_loss_is_the_cross_entropy_summed_over_targets(model: Decoder):
    batch = random_batch(3, [[24], [9, 6]], seq_length=24)
    out = model(
        batch.tokens,
        batch.positions,
        batch.targets,
        document_ids_BS=batch.document_ids,
        valid_index_T=batch.valid_index,
    )
    assert out.logits_BSV is None
    assert out.loss.dtype == torch.float32
    log_probs = F.log_softmax(logits_of(model, batch).double(), dim=-1)
    named = batch.targets != -100
    assert 0 < named.sum() == batch.num_targets < 39
    expected = -log_probs[named].gather(1, batch.targets[named][:, None]).sum()
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_statistics_are_per_layer_and_losses_sum_over_layers(model: Decoder):
    batch = random_batch(4, [[24], [15]], seq_length=24)
    seen = []
    for block in model.layers:
        block.register_forward_hook(lambda _module, _args, output: seen.append(output[1]))
    out = model(batch.tokens, batch.positions, batch.targets, valid_index_T=batch.valid_index)
    assert out.aux_loss.item() == pytest.approx(sum(stats.aux_loss.item() for stats in seen), rel=1e-6)
    assert out.z_loss.item() == pytest.approx(sum(stats.z_loss.item() for stats in seen), rel=1e-6)
    assert torch.equal(out.tokens_per_expert_LE, torch.stack([stats.tokens_per_expert_E for stats in seen]))
    assert out.tokens_per_expert_LE.sum(1).tolist() == [39 * SMALL.top_k] * 2
    assert torch.equal(out.entropy_L, torch.stack([stats.entropy for stats in seen]))


def test_tied_head_is_the_embedding():
    tied = plain_decoder(replace(SMALL, tie_embeddings=True))
    untied = plain_decoder(SMALL)
    assert {name for name, _ in untied.named_parameters()} - {name for name, _ in tied.named_parameters()} == {
        "lm_head.weight"
    }
    assert untied.lm_head is not None
    batch = random_batch(5, [[24]], seq_length=24)
    with torch.no_grad():
        untied.lm_head.weight.copy_(untied.embed.weight)
    assert torch.equal(logits_of(tied, batch), logits_of(untied, batch))


@pytest.mark.parametrize("term", ["aux_loss_coeff", "z_loss_coeff"])
def test_gradient_of_the_gate_follows_the_coefficient(term: str):
    batch = random_batch(6, [[24], [9, 6]], seq_length=24)

    def gate_gradients(coefficient: float) -> Tensor:
        model = plain_decoder(SMALL)
        objective = Objective(**{"aux_loss_coeff": 0.0, "z_loss_coeff": 0.0, term: coefficient})
        accumulate_gradients(model, [batch], StepCounts(batch.num_targets, batch.num_tokens), objective)
        gradients = [block.moe.router.weight.grad for block in model.layers]  # pyright: ignore
        return torch.stack(gradients)  # pyright: ignore

    without, with_one, with_three = (gate_gradients(c) for c in (0.0, 1.0, 3.0))
    assert (with_one - without).abs().amax(dim=(1, 2)).gt(1e-4).all()
    torch.testing.assert_close(with_three - without, 3 * (with_one - without), rtol=1e-3, atol=1e-6)
