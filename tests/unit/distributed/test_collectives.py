import pytest

from moe_framework.distributed.collectives import raise_together, together
from moe_framework.errors import DataError


def test_without_a_process_group_the_error_is_raised_as_it_is():
    error = DataError("data.path=/x: missing.")
    with pytest.raises(DataError) as caught:
        raise_together(error)
    assert caught.value is error


def test_without_an_error_nothing_happens():
    raise_together(None)


def test_together_gives_the_result_or_the_users_mistake_and_leaves_bugs_alone():
    assert together(lambda: 3) == 3
    for error in (DataError("data.path=/x: missing."), ValueError("a bug")):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            together(fail)
        assert caught.value is error
