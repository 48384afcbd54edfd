"""Watchdog: sees that a rank is gone, stuck or out of reach, says which one in one line, and ends all of them.

A thread of each rank looks once a second whether the other ranks of its node are there, and whether its own rank gets
on. With several nodes, one rank of each node also leaves a word in the store of the start every few seconds. A rank
that sees something wrong, or has lost a connection, asks all nodes what their ranks do. One node then says which rank
is at fault (culprit.py).
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from dtlayout.base.errors import EXIT_CRASHED, DtlayoutError
from dtlayout.schedules.actions import Action
from dtlayout.training.culprit import CERTAIN, Culprit, find_culprit, find_culprit_alone
from dtlayout.training.links import Node, find_addresses, find_peer
from dtlayout.training.progress import RankProgress, SharedStatus, new_path

POLL_S = 1.0
"""Seconds between two looks of the thread."""
BEAT_S = 5.0
"""Seconds between two words that a node leaves in the store."""
GRACE_S = 2 * BEAT_S
"""Seconds that nodes have to say what their ranks do; each hears within a beat that it is asked."""
SETTLE_S = 2.0
"""Longest time from a lost connection until the process behind it is seen to be gone."""
ASLEEP_S = 5.0
"""Largest delay of a look; after a longer one, the looking process was itself stopped."""
SPARE_S = 20.0
"""Seconds by which the limits of process groups exceed the watchdog's, so that the watchdog speaks first."""

_T = TypeVar("_T")

_LOST = ("connection", "broken pipe", "timed out", "nccl", "gloo")
"""Words in the message of a RuntimeError, in lower case, that show that another rank is its reason."""


def _to_json(node: Node) -> str:
    return json.dumps(asdict(node))


def _parse(text: bytes, *, is_silent: bool) -> Node:
    """Read the record of a node from the store."""
    value = json.loads(text)
    return Node(**{**value, "records": [RankProgress(**each) for each in value["records"]], "is_silent": is_silent})


class Watchdog:
    """Notes what this rank does where other ranks can read it, and watches the other ranks."""

    def __init__(
        self, store: dist.Store, timeout_s: float, patience_s: float, *, note: Callable[[str, bool], None], flight: Path
    ):
        """Open the status that the ranks of a node share; all ranks do this, over a store of this start alone.

        A rank that stands still for `timeout_s` seconds is ended; where it reads or writes much, for `patience_s`.
        On one rank, `note` is called with the line about the rank at fault, and whether that rank refused to go on.
        `flight` is the folder for NCCL's flight records.
        """
        e = os.environ
        rank, world_size = int(e["RANK"]), int(e["WORLD_SIZE"])
        # Ranks that no torchrun has started know of no node, whatever else they are told: each is its own.
        knows_nodes = all(name in e for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"))
        num_local, local_rank = (int(e["LOCAL_WORLD_SIZE"]), int(e["LOCAL_RANK"])) if knows_nodes else (1, 0)
        self._node = int(e["GROUP_RANK"]) if knows_nodes else rank
        self._num_nodes = int(e["GROUP_WORLD_SIZE"]) if knows_nodes else world_size
        self._is_first = local_rank == 0
        self._is_alone = world_size == 1
        own = store.clone()  # type: ignore[attr-defined]  # a connection of its own, on which nobody else waits
        self._store = dist.PrefixStore("watch", own)
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._limit_s = timeout_s
        self._note, self._flight = note, flight
        self._addresses = find_addresses()  # now: a link that goes down takes its own away
        self._status = self._open_status(rank, local_rank, num_local)
        self._is_over = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def _open_status(self, rank: int, local_rank: int, num_local: int) -> SharedStatus:
        key = f"board/{self._node}"
        if self._is_first:
            self._store.set(key, str(new_path()))
        path = Path(self._store.get(key).decode())
        status = SharedStatus(path, num_local, local_rank=local_rank, rank=rank)
        if self._store.add(f"{key}/open", 1) == num_local:
            path.unlink()  # all have it open: nothing is left of it, however they end
        return status

    def at(self, doing: str, *, is_long: bool = False, waits: bool = False) -> None:
        """Note what this rank does from now on, whether that may take long, and whether it waits for other ranks."""
        self._status.write(doing, waits=waits)
        self._limit_s = self._patience_s if is_long else self._timeout_s

    @property
    def step(self) -> int:
        """Number of the step that goes on, from 1; 0 before the first."""
        return self._status.step

    def begin_step(self, step: int) -> None:
        """Note that a step begins, by its number from 1."""
        self._status.step = step
        self.at("beginning")

    def at_action(self, action: Action | None) -> None:
        """Note that this rank begins an action of its schedule, or with None the update after the last one."""
        self.at("the update" if action is None else action.describe())

    def note_refusal(self, reason: str) -> None:
        """Note that this process is about to end, and why."""
        self._status.fail("refused", reason)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """End this process if another rank may have caused the error; only its own error has a traceback."""
        if isinstance(error, DtlayoutError):
            self._status.fail("refused", str(error).splitlines()[0])
            if _is_about_another(error.__cause__) and self._settle():  # torchrun may start it again
                self._end()
        elif isinstance(error, Exception):
            name, (first, *_) = type(error).__name__, str(error).splitlines() or [""]
            state, peer = ("cut off", find_peer(str(error))) if _is_about_another(error) else ("failed", "")
            self._status.fail(state, f"{name}: {first}", peer)
            if not self._is_alone:
                self._end(error)
            self._note(find_culprit([self._read_node()]).line, False)
        else:
            self._status.leave()
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        """Look again and again whether something is wrong, and end the process if so; the thread runs this."""
        looked = next_beat = awake = time.monotonic()
        while not self._is_over.wait(POLL_S):
            now = time.monotonic()
            awake = now if now - looked > POLL_S + ASLEEP_S else awake  # the process itself was stopped for a while
            is_stuck = now - max(self._status.since, awake) > self._limit_s
            if is_stuck or self._status.culprit is not None or self._sees_a_loss():
                self._end()
            if self._num_nodes > 1 and self._is_first and now >= next_beat:
                next_beat = now + BEAT_S
                if _within(BEAT_S, self._beat):
                    self._end()
            looked = time.monotonic()

    def _sees_a_loss(self) -> bool:
        return any(record.state in CERTAIN for record in self._status.read())

    def _settle(self) -> bool:
        """Whether a lost rank is seen, now or within `SETTLE_S`."""
        deadline = time.monotonic() + SETTLE_S
        while not (is_seen := self._sees_a_loss()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return is_seen

    def _beat(self) -> bool:
        """Leave a word of this node in the store; whether another node has asked what is wrong."""
        self._store.set(f"node/{self._node}", _to_json(self._read_node()))
        return bool(self._store.check(["asked"]))

    def _read_node(self) -> Node:
        return Node(host=socket.gethostname(), records=self._status.read(), addresses=self._addresses)

    def _end(self, error: Exception | None = None) -> None:
        """Say which rank is at fault, once a node, and end this process; an error of its own is printed."""
        with self._ending:  # for ever, if the other thread is at it
            try:
                culprit = self._find_culprit()
                self._write_flight_record()
                if error is not None and culprit == self._status.rank:
                    traceback.print_exception(error)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(EXIT_CRASHED)  # NCCL, and threads that save, would wait for ranks that do not come

    def _find_culprit(self) -> int | None:
        """The rank that is at fault, as one rank of the node has found and said; None if none did in time."""
        deadline = time.monotonic() + SETTLE_S + GRACE_S + 2 * BEAT_S
        while (culprit := self._status.culprit) is None and time.monotonic() < deadline:
            if self._status.claim():
                return self._speak()
            time.sleep(0.05)
        return culprit

    def _speak(self) -> int:
        """Find the rank that is at fault and say so; end it if it is on this node and cannot end itself."""
        self._settle()
        own = self._read_node()
        limit_s = GRACE_S + BEAT_S
        culprit, is_judge = find_culprit([own]), True
        if self._num_nodes > 1:
            heard = _within(limit_s, lambda: self._hear(own))
            if heard is None:
                culprit, is_judge = find_culprit_alone(own, limit_s), False
            else:
                culprit, is_judge = heard
        print(culprit.line, file=sys.stderr, flush=True)
        self._status.culprit = culprit.rank
        is_stuck = any(each.rank == culprit.rank and each.state in ("stopped", "running") for each in own.records)
        if is_stuck and culprit.rank != self._status.rank and (process := self._status.find_process(culprit.rank)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if is_judge:  # last, for the disk may be what hangs
            _within(BEAT_S, lambda: self._note(culprit.line, culprit.state == "refused"))
        return culprit.rank

    def _hear(self, own: Node) -> tuple[Culprit, bool]:
        """The culprit that one node finds from what all nodes say, and whether this node is the one.

        The first node that asks finds it.
        """
        self._store.set(f"said/{self._node}", _to_json(own))
        self._store.set("asked", "1")
        is_judge = self._store.add("judges", 1) == 1
        if is_judge:
            if not any(record.state in CERTAIN for record in own.records):
                time.sleep(GRACE_S)
            nodes = []
            for node in range(self._num_nodes):
                for key, is_silent in ((f"said/{node}", False), (f"node/{node}", True)):
                    if self._store.check([key]):
                        nodes.append(_parse(self._store.get(key), is_silent=is_silent))
                        break
            self._store.set("culprit", json.dumps(find_culprit(nodes)))
        return Culprit(*json.loads(self._store.get("culprit"))), is_judge

    def _write_flight_record(self) -> None:
        """Write NCCL's sent and pending operations, for torch's `torchfrtrace`."""
        if self._is_alone or not (dist.is_initialized() and dist.get_backend() == "nccl"):
            return

        def write() -> None:
            self._flight.mkdir(parents=True, exist_ok=True)
            trace = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]  # of CUDA
            (self._flight / f"rank_{self._status.rank}").write_bytes(trace)

        _within(BEAT_S, write)


def _is_about_another(error: BaseException | None) -> bool:
    """Whether an error says that another rank is gone or does not answer."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)


def _within(limit_s: float, ask: Callable[[], _T]) -> _T | None:
    """The result of `ask`, or None if it raises RuntimeError or OSError, or takes longer than `limit_s`.

    Then it goes on in its thread: a store whose host is gone may never answer.
    """
    answers: queue.SimpleQueue[_T | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(ask())
        except (RuntimeError, OSError):
            answers.put(None)

    threading.Thread(target=work, daemon=True).start()
    with suppress(queue.Empty):
        return answers.get(timeout=limit_s)
    return None
