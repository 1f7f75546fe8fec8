import pytest
import torch

from moe_framework.checkpoint.convert.initial import check_shapes, check_sizes, fill_tensors
from moe_framework.errors import CheckpointError
from tests.unit.checkpoint.convert.folders import SIZES, MemorySource, our_tensors


def test_tensors_are_filled_and_cast():
    ours = our_tensors(SIZES)
    source = MemorySource({name: tensor.bfloat16() for name, tensor in ours.items()}, SIZES)
    targets = {name: torch.full_like(tensor, 7.0) for name, tensor in ours.items()}
    check_shapes(source, targets, "x")
    fill_tensors(source, targets)
    assert all(torch.equal(targets[name], tensor.bfloat16().float()) for name, tensor in ours.items())


def test_every_difference_in_size_is_named_with_its_remedy():
    with pytest.raises(CheckpointError) as caught:
        check_sizes(SIZES, SIZES | {"num_heads": 3, "tie_embeddings": True, "top_k": 1}, SIZES.keys(), "/x")
    lines = str(caught.value).splitlines()
    assert lines == [
        "model.num_heads=3: /x has 6.",
        "model.top_k=1: /x has 2.",
        "model.tie_embeddings=True: /x has False. Set model.num_heads=6 model.top_k=2 model.tie_embeddings=false.",
    ]


def test_sizes_that_are_not_asked_for_or_not_known_may_differ():
    wanted = SIZES | {"max_positions": 1, "rope_theta": 3.0}
    check_sizes(SIZES | {"rope_theta": None}, wanted, [key for key in SIZES if key != "max_positions"], "/x")


def test_every_difference_in_tensors_is_named():
    ours = our_tensors(SIZES)
    targets = dict(ours)
    del targets["norm.weight"]
    targets["extra"] = torch.zeros(1)
    targets["embed.weight"] = torch.zeros(100, 48)
    with pytest.raises(CheckpointError) as caught:
        check_shapes(MemorySource(ours, SIZES), targets, "/x")
    text = str(caught.value)
    assert "/x: 'extra' is missing." in text
    assert "/x: 'norm.weight' is not in the model." in text
    assert "/x: 'embed.weight' is [101, 48], in the model [100, 48]." in text
