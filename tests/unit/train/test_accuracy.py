import torch

from moe_framework.distributed.mesh import build_mesh
from moe_framework.train.accuracy import AccuracyCounter, num_correct
from moe_framework.train.evaluate import measure
from tests.helpers.one_rank import one_rank
from tests.unit.model.builders import plain_decoder, random_batch


def test_targets_with_the_largest_logit_count_and_absent_targets_do_not():
    logits = torch.tensor([[[0.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 0.0, 5.0], [9.0, 0.0, 0.0]]])
    assert num_correct(logits, torch.tensor([[1, 1, 2, -100]])).item() == 2


def test_of_equal_logits_the_first_token_counts():
    logits = torch.tensor([[[0.0, 2.0, 2.0], [0.0, 2.0, 2.0]]], dtype=torch.bfloat16)
    assert num_correct(logits, torch.tensor([[1, 2]])).item() == 1


def test_the_count_is_that_of_the_models_logits_and_leaves_the_loss_alone():
    model, batches = plain_decoder(), [random_batch(seed, [[16], [3]], seq_length=16) for seed in range(3)]
    expected = 0
    with torch.no_grad():
        for batch in batches:
            logits = model(
                batch.tokens, batch.positions, document_ids_BS=batch.document_ids, valid_index_T=batch.valid_index
            ).logits_BSV
            expected += int((logits.argmax(-1) == batch.targets).sum())
    own = model.cross_entropy_sum
    with one_rank() as runtime:
        mesh = build_mesh("cpu", dp=1, ep=1)
        plain = measure(model, batches, mesh=mesh, device=runtime.device)
        with AccuracyCounter(model, mesh, runtime.device) as counter:
            counted = measure(model, batches, mesh=mesh, device=runtime.device)
            assert counter.take() == expected > 0
            assert counter.take() == 0
    assert counted.loss_sum == plain.loss_sum
    assert model.cross_entropy_sum is own
