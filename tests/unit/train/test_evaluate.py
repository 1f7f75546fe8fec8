import numpy as np
import pytest
import torch

from moe_framework.data.loader import collate
from moe_framework.distributed.mesh import build_mesh
from moe_framework.train.evaluate import measure
from tests.helpers.one_rank import one_rank
from tests.unit.model.builders import SMALL, plain_decoder, random_batch, random_row


def test_mean_is_over_targets_and_padding_counts_for_nothing():
    model = plain_decoder()
    batches = [random_batch(seed, rows, seq_length=16) for seed, rows in enumerate([[[16], [3]], [[2, 2], [9]]])]
    empty = collate([random_row(np.random.default_rng(0), [], 16, SMALL.vocab_size)] * 2, (0, 1))
    total, num_targets = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            logits = model(
                batch.tokens, batch.positions, document_ids_BS=batch.document_ids, valid_index_T=batch.valid_index
            ).logits_BSV
            chosen = batch.targets >= 0
            total -= logits.double().log_softmax(-1)[chosen, batch.targets[chosen]].sum().item()
            num_targets += int(chosen.sum())
    with one_rank() as runtime:
        mesh = build_mesh("cpu", dp=1, ep=1)
        loss = measure(model, [batches[0], empty, batches[1]], mesh=mesh, device=runtime.device).loss
        nothing = measure(model, [empty], mesh=mesh, device=runtime.device).loss
    assert loss == pytest.approx(total / num_targets, rel=1e-6)
    assert nothing == 0
    assert all(p.grad is None for p in model.parameters())


def test_routing_and_counts_are_those_of_all_batches():
    model = plain_decoder()
    batches = [random_batch(seed, [[16], [3]], seq_length=16) for seed in range(3)]
    with one_rank() as runtime:
        mesh = build_mesh("cpu", dp=1, ep=1)
        found = measure(model, batches, mesh=mesh, device=runtime.device)
        nothing = measure(model, [], mesh=mesh, device=runtime.device)
    assert found.num_tokens == sum(batch.num_tokens for batch in batches)
    assert found.num_targets == sum(batch.num_targets for batch in batches)
    assert found.tokens_per_expert_LE is not None
    assert found.entropy_L is not None
    assert found.tokens_per_expert_LE.sum(1).tolist() == [SMALL.top_k * found.num_tokens] * SMALL.num_layers
    assert ((found.entropy_L > 0) & (found.entropy_L <= found.num_tokens * np.log(SMALL.num_experts))).all()
    assert nothing == (0, 0, 0, None, None)
