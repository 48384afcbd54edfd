"""Fixtures that the whole suite shares."""

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    """Four gloo ranks that live as long as the session."""
    pool = Ranks(4)
    yield pool
    pool.close()
