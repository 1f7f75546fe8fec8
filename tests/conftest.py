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
