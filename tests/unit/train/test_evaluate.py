import numpy as np
import pytest
import torch

from moe_framework.data.loader import collate
from moe_framework.distributed.mesh import build_mesh
from moe_framework.train.evaluate import evaluate
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
        loss = evaluate(model, [batches[0], empty, batches[1]], mesh=mesh, device=runtime.device)
        nothing = evaluate(model, [empty], mesh=mesh, device=runtime.device)
    assert loss == pytest.approx(total / num_targets, rel=1e-6)
    assert nothing == 0
    assert all(p.grad is None for p in model.parameters())
