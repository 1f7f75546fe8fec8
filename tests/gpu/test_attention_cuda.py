"""Attention of packed rows on a GPU: which kernel is taken, and its result against plain products in float32."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from moe_framework.model.attention import attend, attention_context, document_mask

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
# Three roundings of 2^-9: of the probabilities or their gradient, of each head's part, and of the heads' sum.
BF16 = 3 * 2.0**-9


def _ids(length: int) -> Tensor:
    """[2, S]; one row ends in padding, which has an id of its own."""
    rows = ((length // 2 + 5, length // 4, length - length // 2 - 5 - length // 4), (length - 40, 30, 10))
    return torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in rows]).cuda()


def _leaves(length: int, *, low_scores: bool) -> list[Tensor]:
    """Queries, keys and values in bf16; with low scores, every row's logsumexp is below ln of the smallest float32."""
    generator = torch.Generator("cuda").manual_seed(length)
    shapes = ((2, HEADS, length, HEAD_DIM), *2 * ((2, KV_HEADS, length, HEAD_DIM),))
    q, k, v = (torch.randn(shape, device="cuda", generator=generator) for shape in shapes)
    if low_scores:
        q, k = 0.1 * q, 0.1 * k
        q[..., 0], k[..., 0] = 1.0, -120 * HEAD_DIM**0.5
    return [leaf.bfloat16().requires_grad_() for leaf in (q, k, v)]


def _context_mask(length: int, ids: Tensor) -> Tensor:
    positions = torch.arange(length, device="cuda").expand(2, -1)
    mask = attention_context(positions, ids, head_dim=HEAD_DIM, theta=1e4, dtype=torch.bfloat16).mask
    assert mask is not None
    return mask


def _relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# Lengths that leave 64 of 128, where cuDNN's backward gave NaN for low scores (pytorch#196678), and that leave none.
@pytest.mark.parametrize("length", [192, 256])
@pytest.mark.parametrize("low_scores", [False, True])
def test_packed_rows_in_bf16_equal_plain_products_in_fp32(length: int, low_scores: bool):
    ids = _ids(length)
    leaves = _leaves(length, low_scores=low_scores)
    cotangent = torch.randn(2, HEADS, length, HEAD_DIM, device="cuda").bfloat16()
    out = attend(*leaves, _context_mask(length, ids))  # pyright: ignore[reportCallIssue]
    found = [out, *torch.autograd.grad(out, leaves, cotangent)]
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    with sdpa_kernel(SDPBackend.MATH):
        reference = F.scaled_dot_product_attention(*exact, attn_mask=document_mask(ids), enable_gqa=True)
    expected = [reference, *torch.autograd.grad(reference, exact, cotangent.float())]
    for name, value, wanted in zip(("out", "q", "k", "v"), found, expected, strict=True):
        assert value.isfinite().all(), name
        if low_scores and name == "q":
            continue  # what the probabilities' gradients lack of a sum of zero is multiplied by the keys' -960
        assert _relative(value, wanted) < BF16, name


@pytest.mark.parametrize("packed", [False, True])
def test_the_kernels_are_fused_with_a_mask_and_without(packed: bool):
    leaves = _leaves(256, low_scores=False)
    mask = _context_mask(256, _ids(256)) if packed else None
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        attend(*leaves, mask)  # pyright: ignore[reportCallIssue]
    names = {event.name for event in profiler.events() or ()}
    taken = {name.removeprefix("aten::_scaled_dot_product_") for name in names if "_scaled_dot_product_" in name}
    assert taken == {"efficient_attention"} if packed else taken <= {"cudnn_attention", "flash_attention"}
