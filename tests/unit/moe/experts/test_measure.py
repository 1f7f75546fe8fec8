import logging

import pytest
import torch

from moe_framework.errors import DependencyError
from moe_framework.moe.experts.base import ExpertBackend
from moe_framework.moe.experts.measure import milliseconds


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of memory\nand more"),
        DependencyError("missing"),
        AssertionError(),
        ValueError("32"),
        KeyError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_candidate_that_fails_in_any_way_is_left_out_by_name(error: Exception, caplog: pytest.LogCaptureFixture):
    def make() -> ExpertBackend:
        raise error

    sizes = {"num_local_experts": 2, "hidden_size": 4, "intermediate_size": 4, "num_rows": 8}
    with caplog.at_level(logging.WARNING):
        time = milliseconds(
            "te", make, **sizes, dtype=torch.float32, weight_dtype=torch.float32, device=torch.device("cpu")
        )
    assert time == float("inf")
    (record,) = caplog.records
    named = f"te failed and is left out ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    assert record.getMessage() == f"experts.backend: {named}"


def test_an_interruption_is_no_failed_candidate():
    def make() -> ExpertBackend:
        raise KeyboardInterrupt

    sizes = {"num_local_experts": 2, "hidden_size": 4, "intermediate_size": 4, "num_rows": 8}
    with pytest.raises(KeyboardInterrupt):
        milliseconds("te", make, **sizes, dtype=torch.float32, weight_dtype=torch.float32, device=torch.device("cpu"))
