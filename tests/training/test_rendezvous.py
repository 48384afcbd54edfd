"""Ranks that find each other, over a store that is not empty, and a signal that comes meanwhile."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dtlayout.base.errors import LostRanks
from dtlayout.base.signals import Stopped, StopRequest
from dtlayout.training import rendezvous
from dtlayout.training.rendezvous import find_fresh, meet

TIMEOUT_S = 20


def find_all(store: dist.Store, world_size: int) -> list[dist.Store]:
    """What each rank of a start finds, the last one first to come."""
    with ThreadPoolExecutor(world_size) as ranks:
        found = [ranks.submit(find_fresh, store, r, world_size, TIMEOUT_S) for r in reversed(range(world_size))]
        return [each.result(timeout=2 * TIMEOUT_S) for each in found]


def test_the_ranks_of_a_start_meet_and_see_nothing_of_an_earlier_one():
    store = dist.HashStore()
    for world_size in (3, 3, 2, 4):  # a restart, one with a node less, one with more
        ranks = find_all(store, world_size)
        assert not any(each.check(["address"]) for each in ranks)
        ranks[0].set("address", f"of {world_size}")
        assert {each.get("address") for each in ranks} == {f"of {world_size}".encode()}


def test_a_rank_that_does_not_come_is_missed():
    store = dist.HashStore()
    find_all(store, 2)  # so that the missing rank's word of an earlier start is there
    with pytest.raises(LostRanks, match="only 1 of 2 ranks have come within 0 s"):
        find_fresh(store, 0, 2, 0.3)


def meet_as(num_ranks: int, stopped: set[int], timeout_s: float = 20) -> list[str]:
    """How ranks of two end their meeting."""
    store, stops = dist.HashStore(), [StopRequest() for _ in range(num_ranks)]

    def come(rank: int) -> str:
        stops[rank].is_made = rank in stopped
        try:
            meet(store, stops[rank], timeout_s)
        except Stopped:
            return "stopped"
        except LostRanks:
            return "late"
        return "went on"

    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(come, range(num_ranks)))


def test_ranks_that_meet_go_on_together_or_are_stopped_together(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(rendezvous, "_HEAR_EVERY_S", 0.05)
    assert meet_as(2, set()) == ["went on", "went on"]
    assert meet_as(1, {0}) == ["stopped"]
    assert meet_as(1, set(), timeout_s=0.2) == ["late"]
    for stopped in ({0}, {1}, {0, 1}):
        assert len(set(meet_as(2, stopped))) == 1
