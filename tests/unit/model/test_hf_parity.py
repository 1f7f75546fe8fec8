"""Logits, loss and gradients equal those of transformers' Mixtral and Qwen3-MoE with the same weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_framework.config.schema import ModelConfig
from moe_framework.model.decoder import IGNORE_INDEX, Decoder
from tests.unit.model.builders import plain_decoder, relative_difference

pytest.importorskip("transformers", reason="needs the hf extra")
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

TOLERANCE = 1e-5
SIZES = ModelConfig(
    num_layers=3,
    hidden_size=48,
    intermediate_size=56,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    num_experts=8,
    top_k=2,
    vocab_size=101,
    max_positions=128,
    init_std=0.1,
)
NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q_proj.weight": "self_attn.q_proj.weight",
    "attention.k_proj.weight": "self_attn.k_proj.weight",
    "attention.v_proj.weight": "self_attn.v_proj.weight",
    "attention.o_proj.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "moe_norm.weight": "post_attention_layernorm.weight",
    "moe.router.weight": "mlp.gate.weight",
    "moe.experts.gate_up": "mlp.experts.gate_up_proj",
    "moe.experts.down": "mlp.experts.down_proj",
}


def their_name(name: str) -> str:
    if not name.startswith("layers."):
        return NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{NAMES[rest]}"


def their_model(sizes: ModelConfig) -> Any:
    # Their signatures leave out what every config takes.
    make_config: Any = Qwen3MoeConfig if sizes.qk_norm else MixtralConfig
    config = make_config(
        **({"moe_intermediate_size": sizes.intermediate_size, "norm_topk_prob": True} if sizes.qk_norm else {}),
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.max_positions,
        rms_norm_eps=sizes.norm_eps,
        tie_word_embeddings=sizes.tie_embeddings,
        num_experts_per_tok=sizes.top_k,
        num_local_experts=sizes.num_experts,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        sliding_window=None,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return (Qwen3MoeForCausalLM if sizes.qk_norm else MixtralForCausalLM)(config).float()


def pair(sizes: ModelConfig, backend: str) -> tuple[Decoder, Any]:
    """Our decoder and theirs with the same random weights, norms included."""
    ours, theirs = plain_decoder(sizes, backend=backend), their_model(sizes)
    their_parameters = dict(theirs.named_parameters())
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            their_parameters[their_name(name)].copy_(parameter)
    assert len(their_parameters) == len(dict(ours.named_parameters()))
    return ours, theirs


KINDS = {
    "mixtral-loop": ("loop", {}),
    "mixtral": ("grouped_mm", {}),
    "mixtral-tied": ("grouped_mm", {"tie_embeddings": True}),
    "qwen3-moe": ("grouped_mm", {"qk_norm": True, "norm_eps": 1e-6}),
}


@pytest.fixture(params=KINDS)
def models(request: pytest.FixtureRequest) -> tuple[Decoder, Any]:
    backend, options = KINDS[request.param]
    return pair(replace(SIZES, **options), backend)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, SIZES.vocab_size, (3, 40), generator=torch.Generator().manual_seed(3))


def test_logits_are_equal(models: tuple[Decoder, Any], tokens: Tensor):
    ours, theirs = models
    with torch.no_grad():
        logits = ours(tokens, torch.arange(40).expand(3, 40)).logits_BSV
        expected = theirs(tokens).logits
    assert logits is not None
    assert relative_difference(logits, expected) <= TOLERANCE


def test_loss_and_every_gradient_are_equal(models: tuple[Decoder, Any], tokens: Tensor):
    ours, theirs = models
    targets = torch.full_like(tokens, IGNORE_INDEX)
    targets[:, :-1] = tokens[:, 1:]
    out = ours(tokens, torch.arange(40).expand(3, 40), targets)
    loss = out.loss / (targets != IGNORE_INDEX).sum()
    loss.backward()
    expected = theirs(tokens, labels=tokens).loss
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    their_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert relative_difference(parameter.grad, their_gradients[their_name(name)]) <= TOLERANCE, name


def test_swapped_gate_and_up_would_be_noticed(tokens: Tensor):
    ours, theirs = pair(SIZES, "loop")
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("gate_up_proj"):
                parameter.copy_(parameter.roll(SIZES.intermediate_size, dims=1))
        logits = ours(tokens, torch.arange(40).expand(3, 40)).logits_BSV
        assert logits is not None
        assert relative_difference(logits, theirs(tokens).logits) > 100 * TOLERANCE
