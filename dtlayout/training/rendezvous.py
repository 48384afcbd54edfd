"""Rendezvous: the ranks of a start find each other over a store of keys, and join torch.distributed over it.

[Note: keys of an earlier start]
torchrun starts ranks again over the store of the earlier ranks, whose addresses are still in it. A rank that believes
them waits for dead processes. No number tells the starts apart: an agent counts only the failures that it saw, so nodes
may count differently. So every rank leaves a random word. Rank 0 answers under a key that is made of that word, with a
word of its own. All keys of this start lie below rank 0's word. Rank 0 looks again until all ranks have come, since a
word may be an earlier rank's.
"""

import os
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from dtlayout.base.errors import LostRanks
from dtlayout.base.formatting import plural
from dtlayout.base.signals import Stopped, StopRequest
from dtlayout.spec.device import Device

_LOOK_EVERY_S = 0.05
_AGREED = "meeting/agreed"
_HEAR_EVERY_S = 1.0
"""Longest wait inside torch, seconds, since Python hears of no signal meanwhile."""


def open_store(timeout_s: float) -> dist.Store:
    """The store over which the ranks of torchrun's environment talk; without torchrun, that of a world of one rank.

    It holds nothing that an earlier start of the same job has left. LostRanks if not all ranks come in time.
    """
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except dist.DistError as error:
        raise LostRanks(f"the host of rank 0 does not answer: {str(error).splitlines()[0]}") from error
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store  # rank 0 has just made it
    return find_fresh(dist.PrefixStore("dtlayout", store), rank, world_size, timeout_s)


def find_fresh(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """The part of a store that only the ranks of this start use: [Note: keys of an earlier start]."""
    word, words = uuid4().hex, [f"word/{each}" for each in range(world_size)]
    store.set(words[rank], word)
    if rank != 0:
        _wait(store, [word], timeout_s, "rank 0 has not answered")
        fresh = dist.PrefixStore(store.get(word).decode(), store)
        fresh.add("ranks", 1)
        return fresh
    answered: set[bytes] = set()
    fresh, deadline = dist.PrefixStore(word, store), time.monotonic() + timeout_s
    _wait(store, words, timeout_s, f"some of {world_size} ranks have not come")
    while (found := 1 + fresh.add("ranks", 0)) < world_size:
        if time.monotonic() > deadline:
            raise LostRanks(f"only {found} of {plural(world_size, 'rank')} have come within {timeout_s:.0f} s")
        for other in set(store.multi_get(words)) - answered:
            store.set(other.decode(), word)
            answered.add(other)
        time.sleep(_LOOK_EVERY_S)
    return fresh


def _wait(store: dist.Store, keys: list[str], timeout_s: float, problem: str) -> None:
    """Return once the keys are there; LostRanks, with the `problem`, if they do not come in time."""
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise LostRanks(f"{problem} within {timeout_s:.0f} s") from error


def meet(store: dist.Store, stop: StopRequest, timeout_s: float) -> None:
    """Return once all ranks are here, or raise Stopped on all of them: [Note: signals before the first step].

    LostRanks if some are not here in time.
    """
    stop.begin()  # from here on they end together
    world_size, deadline = int(os.environ["WORLD_SIZE"]), time.monotonic() + timeout_s
    if store.add("meeting/here", 1) == world_size:
        store.compare_set(_AGREED, "", "go")
    while True:
        if stop.is_made:
            store.compare_set(_AGREED, "", "stop")  # what is there first counts
        try:
            store.wait([_AGREED], timedelta(seconds=_HEAR_EVERY_S))
            break
        except dist.DistStoreError as error:
            if time.monotonic() > deadline:
                raise LostRanks(f"not all of {world_size} ranks have met within {timeout_s:.0f} s") from error
    if store.get(_AGREED) != b"go":
        raise Stopped


def join_ranks(device: Device, timeout_s: float, store: dist.Store | None = None) -> None:
    """Initialise torch.distributed from torchrun's environment over `store`; without it, as a world of one rank."""
    store = store or open_store(timeout_s)
    # No device_id: with it all messages of a pipeline rank would share one stream.
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("default_pg", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )
