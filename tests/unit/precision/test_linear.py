import pytest
import torch
from torch import nn

pytest.importorskip("torchao", reason="torchao is not installed ('.[mx]')")

from moe_framework.precision.linear import EmulatedMxfp8Linear, quantize_linears
from tests.unit.model.builders import relative_difference

# E4M3 keeps 3 bits after the point: each factor is off by at most 2^-4 of itself, at random, so that a product of
# two is off by less than 2^-4 in the norm; rounding to nothing at all would give 0, another scale or layout about 1.
E4M3 = 2**-4


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
        self.second = nn.Linear(96, 64, bias=False, dtype=torch.bfloat16)
        self.norm = nn.RMSNorm(64)


def test_every_linear_layer_below_is_replaced_and_its_weight_kept():
    module = Pair()
    weights = dict(module.named_parameters())
    quantize_linears(module, "mxfp8_emulated")
    assert isinstance(module.first, EmulatedMxfp8Linear)
    assert isinstance(module.second, EmulatedMxfp8Linear)
    assert isinstance(module.norm, nn.RMSNorm)
    replaced = dict(module.named_parameters())
    assert replaced.keys() == weights.keys()
    assert all(replaced[name] is weights[name] for name in weights)


@pytest.mark.parametrize("mode", ["fp8_current", "fp8_delayed", "fp8_block"])
def test_fp8_layers_keep_the_weights_names_and_shapes(mode: str):
    module = Pair().to("meta")
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    quantize_linears(module, mode)
    assert {name: parameter.shape for name, parameter in module.named_parameters()} == shapes
    assert type(module.first).__name__ == "Float8Linear"


@pytest.mark.parametrize("tokens", [(2, 21), (64,), (1, 1)], ids=str)
def test_emulated_products_are_those_of_bf16_within_the_rounding_of_e4m3(tokens: tuple[int, ...]):
    module = Pair()
    linear, weight = EmulatedMxfp8Linear(module.first), module.first.weight
    x = torch.randn(*tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    cotangent = torch.randn(*tokens, 96, dtype=torch.bfloat16)
    out = linear(x)
    ours = [out, *torch.autograd.grad(out, [x, weight], cotangent)]
    exact = torch.nn.functional.linear(x, weight)
    theirs = [exact, *torch.autograd.grad(exact, [x, weight], cotangent)]
    for value, reference in zip(ours, theirs, strict=True):
        assert value.shape == reference.shape
        assert 2**-9 < relative_difference(value, reference) < E4M3
