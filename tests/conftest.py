"""Fixtures that the whole suite shares."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from ranks import Ranks

settings.register_profile("machines-are-slow-at-times", deadline=None)
settings.load_profile("machines-are-slow-at-times")


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    """Four gloo ranks that live as long as the session."""
    pool = Ranks(4)
    yield pool
    pool.close()
