"""Records when this rank works on each forward and backward of a step, on a clock that all ranks share.

On a CPU the clock is the host's. On CUDA times are events of the stream that computes, so nothing waits for them. An
action begins when its input is there and ends where the next one is launched; messages are not part of it. FSDP2's
gathers and reductions are part of an action as far as it waits for them, and have times of their own, on the stream on
which they run. A message lasts from the moment it is asked for until it is taken.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dtlayout.pipelining.timeline import Timeline
from dtlayout.schedules.actions import COMPUTE, RECEIVE, Action, Kind
from dtlayout.spec.layout import Layout

_PINGS = 8
"""How often a rank asks a rank of another host for its clock; the fastest answer counts."""

_Mark = float | torch.cuda.Event


class _Marked(NamedTuple):
    """An action or a transfer, with the marks of its begin and its end."""

    name: str
    start: _Mark
    end: _Mark


class TimelineRecorder:
    """Records the actions and transfers of one rank, in the steps for which `begin` is called."""

    def __init__(self, device_type: str, layout: Layout, timeout_s: float):
        """Open a group of the first rank of each pipeline rank, which are recorded; a collective of all ranks."""
        stage_ranks = layout.world_size // layout.pp
        recorded = list(range(0, layout.world_size, stage_ranks))
        self._group = dist.new_group(recorded, backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._pp_rank = recorded.index(dist.get_rank()) if dist.get_rank() in recorded else None
        self._num_ranks, self._on_cuda = len(recorded), device_type == "cuda"
        self._is_on = False
        self._actions: list[_Marked] = []
        self._transfers: list[_Marked] = []
        self._asked_for: dict[Action, _Mark] = {}
        self._running: Action | None = None
        self._began: _Mark = 0.0
        self._origin: tuple[float, _Mark] = (0.0, 0.0)

    def begin(self) -> None:
        """Record the step that is launched next."""
        if self._pp_rank is None:
            return
        self._is_on, self._actions, self._transfers, self._running = True, [], [], None
        if self._on_cuda:
            torch.cuda.synchronize()  # so that host and device are at the same moment
            self._origin = time.perf_counter(), self._now()

    def before_action(self, action: Action | None) -> None:
        """Note that this rank begins an action, or with None that it has done the last one of a step."""
        if not self._is_on:
            return
        now = self._now()
        if self._running is not None:
            self._actions.append(_Marked(str(self._running), self._began, now))
        if action and action.kind in RECEIVE.values():
            self._asked_for[action] = now
        self._running, self._began = (action if action and action.kind in COMPUTE else None), now
        self._is_on = action is not None

    def after_input(self) -> None:
        """Note that the input of the current action is there."""
        if not self._is_on:
            return
        self._began = self._now()
        assert self._running is not None, "it is an action that computes which waits"
        message = self._running._replace(kind=RECEIVE[self._running.kind is not Kind.FORWARD])
        if message in self._asked_for:
            self._transfers.append(_Marked("message", self._asked_for.pop(message), self._began))

    @contextmanager
    def transfer(self, name: str) -> Iterator[None]:
        """A block in which something is sent or gathered."""
        if not self._is_on:
            yield
            return
        start = self._now()
        yield
        self._transfers.append(_Marked(name, start, self._now()))

    def gather(self) -> Timeline | None:
        """The timeline of the last recorded step, on rank 0; None elsewhere. A collective of the recorded ranks."""
        if self._pp_rank is None:
            return None
        if self._on_cuda:
            torch.cuda.synchronize()
        offset_s = _find_offset(self._group)
        own = [
            [(name, *(offset_s + self._to_seconds(mark) for mark in marks)) for name, *marks in several]
            for several in (self._actions, self._transfers)
        ]
        found: list[list[list[tuple[str, float, float]]]] | None = None
        if self._pp_rank == 0:
            found = [[] for _ in range(self._num_ranks)]
        dist.gather_object(own, found, group_dst=0, group=self._group)
        return Timeline.of_rows(*zip(*found, strict=True)) if found else None

    def _now(self) -> _Mark:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _to_seconds(self, mark: _Mark) -> float:
        """Time of a mark on the host's clock, seconds."""
        if isinstance(mark, float):
            return mark
        host_s, event = self._origin
        assert isinstance(event, torch.cuda.Event), "an event counts from the one with which the step began"
        return host_s + event.elapsed_time(mark) / 1e3


def _find_offset(group: ProcessGroup) -> float:
    """Seconds to add to this rank's clock for that of the group's first rank; a collective.

    A clock of another host is asked several times. The error is at most half of the fastest round trip (Cristian's
    algorithm, 1989).
    """
    clocks = [0] * dist.get_world_size(group)
    dist.all_gather_object(clocks, _find_clock(), group=group)
    rank = dist.get_rank(group)
    if clocks[rank] != clocks[0]:
        return _ask(group)
    for peer in range(1, len(clocks)) if rank == 0 else ():
        if clocks[peer] != clocks[0]:
            _answer(peer, group)
    return 0.0


def _ask(group: ProcessGroup) -> float:
    answer, fastest, found = torch.zeros(1, dtype=torch.float64), float("inf"), 0.0
    for _ in range(_PINGS):
        sent = time.perf_counter()
        dist.send(answer, group=group, group_dst=0)
        dist.recv(answer, group=group, group_src=0)
        back = time.perf_counter()
        if back - sent < fastest:
            fastest, found = back - sent, answer.item() - (sent + back) / 2
    return found


def _answer(peer: int, group: ProcessGroup) -> None:
    question = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        dist.recv(question, group=group, group_src=peer)
        dist.send(torch.tensor([time.perf_counter()], dtype=torch.float64), group=group, group_dst=peer)


def _find_clock() -> int:
    """A number that names the clock of this host since its boot, or of a container with a clock of its own."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    return crc32(f"{boot.read_text()} {space.readlink() if space.exists() else ''}".encode())
