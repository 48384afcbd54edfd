"""Fixtures that the whole suite shares."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import settings
from ranks import Ranks

from dtlayout.dryrun.world import fake_world

settings.register_profile("machines-are-slow-at-times", deadline=None)
settings.load_profile("machines-are-slow-at-times")


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    """Four gloo ranks that live as long as the session."""
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A real process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_fake_ranks() -> Iterator[None]:
    """A fake process group that plays rank 0 of two."""
    with fake_world(0, 2):
        yield
