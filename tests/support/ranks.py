"""Ranks: a pool of gloo processes that run functions together, so that many layouts share one launch.

A function runs on every rank at once and returns something that pickles. If one rank fails or the time limit passes,
the pool is taken down, since the others may wait in a collective for ever, and a new one starts with the next call.
"""

import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.context
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


def find_processes() -> multiprocessing.context.ForkServerContext:
    """What starts processes that have imported torch and the trainer already, which takes seconds of each rank's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dtlayout.training.run", "dtlayout.dryrun.rank", "torch._dynamo"])
    return context


class RankFailure(AssertionError):
    """A function failed on some rank; carries its traceback."""


class Ranks:
    """`world_size` processes with an initialised process group."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """The results of `function(*args)` by rank; RankFailure if a rank raises, dies or is late."""
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            return self._collect(time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes; the next `run` starts new ones."""
        for pipe in self._pipes:
            pipe.close()  # a worker that waits for work ends by itself
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = find_processes()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = Path(self._folder.name) / "store"
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.world_size, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = [r for r in range(self.world_size) if r not in results]
                raise RankFailure(f"ranks {missing} did not finish in time")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    is_ok, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise RankFailure(f"rank {rank} died") from None
                if not is_ok:
                    raise RankFailure(f"rank {rank}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]


def _work(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    faulthandler.enable()  # where each thread was, should torch abort
    gc.freeze()  # torch's own objects are a million, which every collection would look through, and copy pages of
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _share_device()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = (True, function(*args))
        except Exception:
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except BrokenPipeError:  # another rank failed first, and nobody listens any more
            break
    dist.destroy_process_group()


def _share_device() -> None:
    """Give all groups of this process one gloo device, and so one thread that waits for messages.

    By default each group has a device of its own, whose thread wakes up a hundred times a second as long as the group
    lives. A pool opens hundreds of groups, and their threads would take half of the machine from the tests.
    """
    from torch.distributed import ProcessGroupGloo

    device, begin = ProcessGroupGloo.create_default_device(), ProcessGroupGloo.__init__

    def begin_on_device(self: Any, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timeout
        begin(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = begin_on_device
