import pytest
import torch

from moe_framework.errors import ConfigError
from moe_framework.moe.experts.choose import choose_experts
from moe_framework.moe.experts.grouped_mm import unsupported_reason

FP32_CPU = {"dtype": torch.float32, "device_type": "cpu"}


@pytest.mark.parametrize(
    ("sizes", "dtype", "named"),
    [
        ({"hidden_size": 34, "intermediate_size": 32}, torch.float32, "hidden_size=34 is no multiple of 4"),
        ({"hidden_size": 32, "intermediate_size": 30}, torch.float32, "intermediate_size=30 is no multiple of 4"),
        ({"hidden_size": 36, "intermediate_size": 32}, torch.bfloat16, "hidden_size=36 is no multiple of 8"),
    ],
)
def test_unaligned_sizes_are_named(sizes: dict[str, int], dtype: torch.dtype, named: str):
    reason = unsupported_reason(**sizes, dtype=dtype, device_type="cpu")
    assert reason is not None
    assert named in reason
    with pytest.raises(
        ConfigError, match=rf"experts\.backend=grouped_mm cannot be used: {named}.*experts\.backend=auto"
    ):
        choose_experts("grouped_mm", **sizes, dtype=dtype, device_type="cpu")
    name, why = choose_experts("auto", **sizes, dtype=dtype, device_type="cpu")
    assert name == "loop"
    assert named in why
    assert choose_experts("loop", **sizes, dtype=dtype, device_type="cpu")[0] == "loop"


def test_grouped_mm_is_refused_for_what_the_cuda_kernel_does_not_take():
    sizes = {"hidden_size": 32, "intermediate_size": 32}
    assert unsupported_reason(**sizes, dtype=torch.bfloat16, device_type="cuda") is None
    assert "float32" in (unsupported_reason(**sizes, dtype=torch.float32, device_type="cuda") or "")


def test_what_is_called_unaligned_is_what_torch_refuses():
    """Should torch lift the rule, this test says so."""
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        torch.nn.functional.grouped_mm(torch.ones(2, 5), torch.ones(1, 5, 4), offs=torch.tensor([2], dtype=torch.int32))


def test_auto_takes_grouped_mm_where_it_can():
    name, why = choose_experts("auto", hidden_size=32, intermediate_size=36, **FP32_CPU)
    assert name == "grouped_mm"
    assert why
    assert choose_experts("grouped_mm", hidden_size=32, intermediate_size=36, **FP32_CPU)[0] == "grouped_mm"
