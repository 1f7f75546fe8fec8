import pytest

from moe_framework.distributed.collectives import raise_together
from moe_framework.errors import DataError


def test_without_a_process_group_the_error_is_raised_as_it_is():
    error = DataError("data.path=/x: missing.")
    with pytest.raises(DataError) as caught:
        raise_together(error)
    assert caught.value is error


def test_without_an_error_nothing_happens():
    raise_together(None)
