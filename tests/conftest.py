"""Fixtures that the whole suite shares."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from cuda import StandInCuda
from hypothesis import settings
from ranks import Ranks

from dtlayout.dryrun.world import fake_world

settings.register_profile("machines-are-slow-at-times", deadline=None)
settings.load_profile("machines-are-slow-at-times")


def pytest_collection_finish() -> None:
    """Keep tests and modules, a million objects, from being looked through by every collection of garbage."""
    gc.freeze()


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which nothing is folded, so that tests look for whole sentences."""
    monkeypatch.setenv("COLUMNS", "1000")


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
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what torchrun tells ranks, during a test that trains in this process and sets it itself."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # so that it is taken away again
        monkeypatch.delenv(name)


@pytest.fixture
def two_fake_ranks() -> Iterator[None]:
    """A fake process group that plays rank 0 of two."""
    with fake_world(0, 2):
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInCuda]:
    """A CUDA device that is not there, for the whole test (`support/cuda.py`)."""
    with StandInCuda(monkeypatch) as stand_in:
        yield stand_in
