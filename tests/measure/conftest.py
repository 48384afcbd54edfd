"""Process groups of one process: a real one with one rank, and a fake one that plays rank 0 of two."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from dtlayout.dryrun.world import fake_world


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_fake_ranks() -> Iterator[None]:
    with fake_world(0, 2):
        yield
