"""Megatron-Core's own saving and loading, on gloo ranks without a GPU, against our reader and writer.

The GPTModel has Megatron's local layers, since Transformer Engine's need a GPU (tests/gpu has those); their names are
the same. Megatron gets a pool of its own: importing it changes what torch.load accepts.
"""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_framework.checkpoint.convert.base import TensorInfo
from moe_framework.checkpoint.convert.boxes import parts
from moe_framework.checkpoint.convert.check import check_tensors
from moe_framework.checkpoint.convert.keymap_megatron import megatron_keymap
from moe_framework.checkpoint.convert.megatron_sink import MegatronSink
from moe_framework.checkpoint.convert.megatron_source import MegatronSource
from moe_framework.checkpoint.convert.views import OurView, TheirView
from tests.distributed import megatron_jobs as jobs
from tests.helpers.pool import RankPool
from tests.unit.checkpoint.convert.megatron_checkpoints import MIXTRAL, InMemory, our_tensors

pytestmark = [
    pytest.mark.slow,  # importing Megatron-Core takes most of the time
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core: install '.[megatron]'"),
]

SIZES = MIXTRAL | {"num_experts": 4}
QWEN3 = SIZES | {"family": "qwen3_moe", "qk_norm": True, "tie_embeddings": True}


@pytest.fixture(scope="module")
def megatron_ranks() -> Iterator[RankPool]:
    pool = RankPool()
    reason = pool.run(jobs.why_not_importable, 2)[0]
    if reason is not None:
        pool.close()
        pytest.skip(reason)
    yield pool
    pool.close()


def merged(by_rank: list[dict[str, np.ndarray]]) -> dict[str, Tensor]:
    """Weights of all ranks under the names of one module that has all experts."""
    weights: dict[str, Tensor] = {}
    for rank, local in enumerate(by_rank):
        num_local = SIZES["num_experts"] // len(by_rank)
        for name, array in local.items():
            tensor = torch.from_numpy(array)
            found = re.match(r"(.*\.local_experts\.)(\d+)(\..*)", name)
            if found is not None:
                name = f"{found[1]}{rank * num_local + int(found[2])}{found[3]}"
            elif name in weights:
                assert torch.equal(weights[name], tensor)
            weights[name] = tensor
    return weights


def as_ours(weights: dict[str, Tensor], sizes: dict) -> dict[str, Tensor]:
    view = OurView(InMemory(weights), megatron_keymap(sizes, weights))
    return {name: view.read(name) for name in view.tensors()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (SIZES, {}),
        (SIZES, {"non_homogeneous_layers": True}),
        (SIZES, {"singleton_local_shards": True}),
        (QWEN3, {}),
    ],
)
def test_what_megatron_saves_at_ep_2_is_read(megatron_ranks, tmp_path, sizes, options):
    weights = merged(megatron_ranks.run(jobs.save_at, 2, str(tmp_path), sizes, 2, options))
    source = MegatronSource(tmp_path)
    assert source.config() == sizes
    assert source.iteration == 7
    keymap = megatron_keymap(sizes, source.tensors())
    assert check_tensors(source, keymap, "it") == []
    view = OurView(source, keymap)
    assert_equal({name: view.read(name) for name in view.tensors()}, as_ours(weights, sizes))


@pytest.mark.parametrize("sizes", [SIZES, QWEN3])
def test_what_we_write_megatron_loads_at_ep_2(megatron_ranks, tmp_path, sizes):
    ours = our_tensors(sizes)
    write(tmp_path, ours, sizes)
    loaded = megatron_ranks.run(jobs.load_at, 2, str(tmp_path), sizes, 2)
    assert_equal(as_ours(merged([rank["weights"] for rank in loaded]), sizes), ours)
    assert loaded[0]["args"]["num_layers"] == 2


def test_a_model_with_padded_embeddings_loads_the_plain_vocabulary(megatron_ranks, tmp_path):
    ours = our_tensors(SIZES)
    write(tmp_path, ours, SIZES)
    padded = SIZES | {"padded_vocab_size": 128}
    (loaded,) = megatron_ranks.run(jobs.load_at, 1, str(tmp_path), padded, 1)
    weights = merged([loaded["weights"]])
    assert weights["embedding.word_embeddings.weight"].shape == (128, 8)
    assert_equal(as_ours(weights, padded), ours)


def write(folder: Path, ours: dict[str, Tensor], sizes: dict) -> None:
    view = TheirView(InMemory(ours), megatron_keymap(sizes))
    sink = MegatronSink(folder)
    infos: dict[str, TensorInfo] = view.tensors()
    sink.begin(infos, sizes)
    for name, info in infos.items():
        for region in parts(info, 200):
            sink.write(name, tuple(part.start for part in region), view.read(name, region))
    sink.finish()
