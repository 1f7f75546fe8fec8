import pytest
import torch
from torch import Tensor

from moe_framework.model.attention import Attention, AttentionContext, attention_context, document_mask

D, HEAD_DIM = 24, 6


def make_attention(*, num_heads: int, num_kv_heads: int) -> Attention:
    torch.manual_seed(0)
    return Attention(hidden_size=D, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM)


def context_without_rotation(shape: tuple[int, int], mask: Tensor | None = None) -> AttentionContext:
    cos = torch.ones(shape[0], 1, shape[1], HEAD_DIM)
    return AttentionContext(cos, torch.zeros_like(cos), mask)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_heads_share_keys_in_consecutive_groups(num_heads: int, num_kv_heads: int):
    attention = make_attention(num_heads=num_heads, num_kv_heads=num_kv_heads)
    x = torch.randn(2, 5, D)
    out = attention(x, context_without_rotation((2, 5)))
    heads = []
    for head in range(num_heads):
        shared = head * num_kv_heads // num_heads
        q = (x @ attention.q_proj.weight.t())[..., head * HEAD_DIM : (head + 1) * HEAD_DIM]
        k = (x @ attention.k_proj.weight.t())[..., shared * HEAD_DIM : (shared + 1) * HEAD_DIM]
        v = (x @ attention.v_proj.weight.t())[..., shared * HEAD_DIM : (shared + 1) * HEAD_DIM]
        scores = (q @ k.transpose(1, 2) / HEAD_DIM**0.5).masked_fill(~torch.ones(5, 5).tril().bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ v)
    expected = torch.cat(heads, dim=-1) @ attention.o_proj.weight.t()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_mask_of_one_document_is_plain_causal_attention():
    attention = make_attention(num_heads=4, num_kv_heads=2)
    x = torch.randn(2, 7, D)
    mask = document_mask(torch.zeros(2, 7, dtype=torch.int64))
    with_mask = attention(x, context_without_rotation((2, 7), mask))
    torch.testing.assert_close(with_mask, attention(x, context_without_rotation((2, 7))), rtol=1e-5, atol=1e-6)


def test_document_mask_shows_earlier_positions_of_the_same_document_only():
    ids = torch.tensor([[0, 0, 1, 1, 1, -1, -1]])
    mask = document_mask(ids)[0, 0]
    for query in range(7):
        for key in range(7):
            assert mask[query, key] == (key <= query and ids[0, query] == ids[0, key])
    assert mask.any(-1).all()  # a row without any key would be NaN


def test_context_without_documents_has_no_mask_and_needs_no_gradient():
    positions = torch.arange(5)[None]
    context = attention_context(positions, None, head_dim=HEAD_DIM, theta=1e4)
    assert context.mask is None
    assert context.cos.shape == (1, 1, 5, HEAD_DIM)
    assert not context.cos.requires_grad
