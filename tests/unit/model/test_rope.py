import math

import pytest
import torch

from moe_framework.model.rope import apply_rotary, rotary_tables


def test_equals_transformers():
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral", reason="needs the hf extra")
    config = modeling.MixtralConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    positions = torch.stack([torch.arange(40), torch.arange(40) * 700])
    q = torch.randn(2, 4, 40, 16)
    cos, sin = modeling.MixtralRotaryEmbedding(config)(q, positions)
    expected, _ = modeling.apply_rotary_pos_emb(q, q, cos, sin)
    actual = apply_rotary(q, *rotary_tables(positions, head_dim=16, theta=1e6))
    # Two float32 frequencies may differ by their last bit, which a position of 27,300 multiplies.
    torch.testing.assert_close(actual[:1], expected[:1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual[1:], expected[1:], rtol=0, atol=27_300 * 2**-22)


def test_pairs_of_channels_half_a_head_apart_turn_by_the_positions_angle():
    x = torch.zeros(1, 1, 1, 8)
    x[..., 1] = 1.0
    turned = apply_rotary(x, *rotary_tables(torch.tensor([[3]]), head_dim=8, theta=100.0)).flatten()
    angle = 3 / 100.0 ** (2 / 8)
    expected = torch.zeros(8)
    expected[1], expected[5] = math.cos(angle), math.sin(angle)
    torch.testing.assert_close(turned, expected)


def test_products_depend_on_the_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16).unbind(0)

    def product(query: int, key: int) -> float:
        turned = [
            apply_rotary(x, *rotary_tables(torch.tensor([[position]]), head_dim=16, theta=1e4))
            for x, position in ((q, query), (k, key))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


def test_bfloat16_is_turned_in_float32():
    x = torch.randn(1, 2, 30, 16).bfloat16()
    tables = rotary_tables(torch.arange(30)[None] + 5000, head_dim=16, theta=1e6)
    turned = apply_rotary(x, *tables)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, apply_rotary(x.float(), *tables).bfloat16())
