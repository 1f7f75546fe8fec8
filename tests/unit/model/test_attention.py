import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_framework.model.attention import Attention, AttentionContext, attend, attention_context, document_mask
from tests.unit.model.builders import relative_difference

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
    context = attention_context(positions, None, head_dim=HEAD_DIM, theta=1e4, dtype=torch.float32)
    assert context.mask is None
    assert context.cos.shape == (1, 1, 5, HEAD_DIM)
    assert not context.cos.requires_grad


PACKED = torch.repeat_interleave(torch.tensor([0, 1, 2, -1]), torch.tensor([3, 7, 1, 5]))[None].expand(2, -1)


def packed_context(dtype: torch.dtype) -> AttentionContext:
    return attention_context(torch.arange(16).expand(2, -1), PACKED, head_dim=HEAD_DIM, theta=1e4, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_mask_is_additive_in_the_compute_dtype_and_leaves_no_row_without_a_key(dtype: torch.dtype):
    mask = packed_context(dtype).mask
    assert mask is not None
    assert mask.dtype == dtype
    seen = document_mask(PACKED)
    assert (mask[seen] == 0).all()
    assert (mask[~seen] == float("-inf")).all()
    assert (mask == 0).any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_attend_as_torch_does_with_a_bool_mask_and_grouped_heads(dtype: torch.dtype):
    torch.manual_seed(0)
    shapes = ((2, 4, 16, HEAD_DIM), (2, 2, 16, HEAD_DIM), (2, 2, 16, HEAD_DIM))
    q, k, v = leaves = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    cotangent = torch.randn(2, 4, 16, HEAD_DIM, dtype=dtype)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(PACKED), enable_gqa=True)
    out = attend(q, k, v, packed_context(dtype).mask)
    assert torch.equal(out, expected)
    wanted = torch.autograd.grad(expected, leaves, cotangent)
    found = torch.autograd.grad(out, leaves, cotangent)
    assert torch.equal(found[0], wanted[0])
    for gradient, reference in zip(found[1:], wanted[1:], strict=True):
        # The heads of a group are rounded before they are added, or after.
        assert relative_difference(gradient, reference) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("packed", [False, True])
def test_with_a_mask_cudnn_is_out_and_no_kernel_has_to_group_heads(packed: bool, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def recording(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool = False, **options: object) -> Tensor:
        calls.append((torch.backends.cuda.cudnn_sdp_enabled(), enable_gqa, q.shape == k.shape == v.shape))
        return real(q, k, v, enable_gqa=enable_gqa, **options)  # pyright: ignore[reportArgumentType]

    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    context = packed_context(torch.float32) if packed else context_without_rotation((2, 16))
    make_attention(num_heads=4, num_kv_heads=2)(torch.randn(2, 16, D), context)
    # MATH alone takes a mask and groups heads, and it keeps all scores.
    assert calls == [(False, False, True) if packed else (True, True, False)]


@pytest.mark.parametrize("num_layers", [1, 5])
def test_one_mask_is_kept_for_backward_whatever_the_number_of_layers(num_layers: int):
    layers = [make_attention(num_heads=4, num_kv_heads=2) for _ in range(num_layers)]
    context, masks = packed_context(torch.float32), set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[-2:] == (16, 16):
            masks.add(tensor.untyped_storage().data_ptr())
        return tensor

    x = torch.randn(2, 16, D)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in layers:
            x = layer(x, context)
    assert context.mask is not None
    assert masks == {context.mask.untyped_storage().data_ptr()}
