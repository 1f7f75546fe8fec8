"""Fixtures of every test folder."""

from collections.abc import Iterator

import pytest

from tests.helpers.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of started ranks, shared by the whole session; nothing starts before the first job."""
    pool = RankPool()
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, and so count, the GPU tests where there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
