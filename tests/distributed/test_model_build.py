from dataclasses import replace

import pytest
import torch

from moe_framework.config.schema import DispatcherConfig, ExpertsConfig
from moe_framework.distributed.mesh import build_mesh
from moe_framework.moe.experts.choose import Choice
from moe_framework.precision.policy import precision_policy
from moe_framework.train.model import build_model, count_parameters, meta_decoder
from tests.distributed.parity_jobs import Layout, Spec, config_of
from tests.helpers.pool import RankPool
from tests.unit.model.builders import SMALL, plain_decoder

SPEC = Spec(seed=0)


def kinds(layout: Layout, dispatcher: str) -> tuple[str, str, bool]:
    """The dispatcher and the expert backend of the first layer, and whether everything is on meta."""
    mesh = build_mesh("cpu", dp=layout.dp, ep=layout.ep)
    config = replace(config_of(SPEC, layout), dispatcher=DispatcherConfig(dispatcher))  # pyright: ignore
    model = meta_decoder(config, mesh, precision_policy("fp32", torch.device("cpu")), Choice("grouped_mm", ""))
    moe = model.layers[0].moe
    on_meta = all(p.is_meta for p in model.parameters())
    return type(moe.dispatcher).__name__, moe.experts.backend.__name__, on_meta  # pyright: ignore


def build_unaligned(backend: str) -> str:
    mesh = build_mesh("cpu", dp=1, ep=2)
    config = config_of(SPEC, Layout(1, 2))
    config = replace(config, model=replace(SMALL, intermediate_size=42), experts=ExpertsConfig(backend))  # pyright: ignore
    model = build_model(config, mesh, torch.device("cpu"))
    return model.layers[0].moe.experts.backend.__name__  # pyright: ignore


@pytest.mark.parametrize(
    ("layout", "dispatcher", "expected"),
    [
        (Layout(1, 1), "auto", "LocalDispatcher"),
        (Layout(1, 1), "all_to_all", "AllToAllDispatcher"),
        (Layout(2, 1), "local", "LocalDispatcher"),
        (Layout(1, 2), "auto", "AllToAllDispatcher"),
    ],
    ids=str,
)
def test_tokens_are_exchanged_only_where_experts_are_elsewhere(
    ranks: RankPool, layout: Layout, dispatcher: str, expected: str
):
    results = ranks.run(kinds, layout.world_size, layout, dispatcher)
    assert results == [(expected, "grouped_mm_experts", True)] * layout.world_size


def test_a_backend_that_cannot_compute_the_sizes_is_refused_by_every_rank(ranks: RankPool):
    first, second = ranks.run_expecting_error(build_unaligned, 2, "grouped_mm")
    assert first is not None
    assert first == second
    assert first[0] == "ConfigError"
    assert "experts.backend=grouped_mm" in first[1]
    assert "intermediate_size=42" in first[1]
    assert ranks.run(build_unaligned, 2, "auto") == ["loop_experts"] * 2


@pytest.mark.parametrize("tied", [False, True])
def test_active_parameters_are_those_of_a_tokens_matrix_products(tied: bool):
    model = plain_decoder(replace(SMALL, tie_embeddings=tied))
    total, active = count_parameters(model, top_k=SMALL.top_k, num_experts=SMALL.num_experts)
    d, f, layers, vocab = SMALL.hidden_size, SMALL.intermediate_size, SMALL.num_layers, SMALL.vocab_size
    attention = d * d + 2 * d * d // 2 + d * d
    router, expert, norms = SMALL.num_experts * d, 3 * d * f, 2 * d
    embeddings = vocab * d * (1 if tied else 2)
    assert total == layers * (attention + router + SMALL.num_experts * expert + norms) + d + embeddings
    assert active == layers * (attention + router + SMALL.top_k * expert + norms) + d + vocab * d
