import pytest
import torch
from torch import Tensor, nn

from moe_framework.moe.layer import MoELayer, TokenLayout
from tests.unit.model.builders import SMALL, plain_moe

B, S, D = 3, 10, SMALL.hidden_size


@pytest.fixture(params=["loop", "grouped_mm"])
def layer(request: pytest.FixtureRequest) -> MoELayer:
    torch.manual_seed(0)
    layer = plain_moe(SMALL, backend=request.param)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def layout_of(lengths: list[int]) -> TokenLayout:
    """Rows with `lengths` tokens each, then padding."""
    valid = torch.cat([row * S + torch.arange(length) for row, length in enumerate(lengths)])
    return TokenLayout.of(torch.Size((len(lengths), S)), valid, torch.device("cpu"))


def gradients(layer: MoELayer) -> dict[str, Tensor]:
    result = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    return result


def test_output_is_the_weighted_sum_of_each_tokens_experts(layer: MoELayer):
    x = torch.randn(B, S, D)
    y, _ = layer(x, TokenLayout.of(x.shape[:2], None, x.device))
    routing = layer.router(x.flatten(0, 1))
    for t, token in enumerate(x.flatten(0, 1)):
        expected = torch.zeros(D)
        for prob, e in zip(routing.probs_TK[t], routing.experts_TK[t], strict=True):
            gate, up = (layer.experts.gate_up[e] @ token).chunk(2)
            expected = expected + prob * (layer.experts.down[e] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(y.flatten(0, 1)[t], expected, rtol=1e-4, atol=1e-5)


def test_padding_output_is_zero_and_padding_gets_no_gradient(layer: MoELayer):
    lengths = [10, 4, 0]
    x = torch.randn(B, S, D, requires_grad=True)
    y, _ = layer(x, layout_of(lengths))
    y.backward(torch.randn(y.shape))
    assert x.grad is not None
    for row, length in enumerate(lengths):
        assert y[row, length:].count_nonzero() == 0
        assert x.grad[row, length:].count_nonzero() == 0
        assert x.grad[row, :length].abs().sum(-1).gt(0).all()


def test_padding_is_neither_routed_nor_counted(layer: MoELayer):
    x = torch.randn(B, S, D)
    _, stats = layer(x, layout_of([10, 4, 0]))
    assert stats.tokens_per_expert_E.sum() == 14 * SMALL.top_k
    changed = x.clone()
    changed[1, 4:], changed[2] = 1e3, -1e3
    y, changed_stats = layer(changed, layout_of([10, 4, 0]))
    assert torch.equal(y, layer(x, layout_of([10, 4, 0]))[0])
    assert all(torch.equal(a, b) for a, b in zip(stats, changed_stats, strict=True))


def test_padded_tokens_compute_what_they_do_without_padding(layer: MoELayer):
    torch.manual_seed(1)
    padded = torch.randn(2, S, D)
    y_padded, padded_stats = layer(padded, layout_of([6, 6]))
    cotangent = torch.randn(2, 6, D)
    torch.autograd.backward([y_padded[:, :6], padded_stats.aux_loss, padded_stats.z_loss], [cotangent, None, None])
    padded_gradients = gradients(layer)

    bare = padded[:, :6].contiguous()
    y, stats = layer(bare, TokenLayout.of(bare.shape[:2], None, bare.device))
    torch.autograd.backward([y, stats.aux_loss, stats.z_loss], [cotangent, None, None])
    assert torch.equal(y_padded[:, :6], y)
    assert all(torch.equal(a, b) for a, b in zip(padded_stats, stats, strict=True))
    assert len(padded_gradients) == 3
    for name, gradient in gradients(layer).items():
        assert torch.equal(padded_gradients[name], gradient), name


def test_a_micro_batch_of_padding_only_has_zero_gradients(layer: MoELayer):
    x = torch.randn(B, S, D, requires_grad=True)
    y, stats = layer(x, layout_of([0, 0, 0]))
    torch.autograd.backward([y, stats.aux_loss, stats.z_loss], [torch.randn(y.shape), None, None])
    assert y.count_nonzero() == 0
    assert stats.tokens_per_expert_E.count_nonzero() == 0
    assert x.grad is not None
    assert x.grad.count_nonzero() == 0
    found = gradients(layer)
    assert len(found) == 3
    assert all(gradient.count_nonzero() == 0 for gradient in found.values())


def test_layout_names_the_row_of_each_token():
    layout = layout_of([2, 0, 3])
    assert layout.row_of_token_T.tolist() == [0, 0, 2, 2, 2]
    assert layout.num_rows == 3
    whole = TokenLayout.of(torch.Size((2, 3)), None, torch.device("cpu"))
    assert whole.valid_index_T is None
    assert whole.row_of_token_T.tolist() == [0, 0, 0, 1, 1, 1]
