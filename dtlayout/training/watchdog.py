"""Watch: sees that a rank is gone, stuck or out of reach, says which one in one line, and ends all of them.

A thread of each rank looks once a second whether the others of its node are there and whether its own rank gets on;
where there are more nodes, one rank of each leaves a word in the store of the start every few seconds. Whoever sees
something wrong, or has lost a connection, has all nodes say what their ranks do. One of them judges.

[Note: who is at fault]
A rank that waits for others is as still as the one for which they wait. So the first to blame is one whose process is
gone, then one that failed by itself, a node of which nothing is heard, a process that is stopped, a rank that lost a
connection, or rather the link at whose end it is (`links`). If there is none of these, it is one that stands still by
itself rather than one that does nothing but wait for others, and of those the rank that stood still first: all others
went on until they needed it. A node that hears of no other one blames a rank of its own only for what it sees of it.
On a GPU that is seen of hosts, which launch ahead of their devices: ranks that all wait for numbers stood still alike,
and only NCCL's flight records tell more.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dtlayout.base.errors import EXIT_CRASHED, DtlayoutError
from dtlayout.schedules.actions import Action
from dtlayout.training.links import Node, describe_cut_links, describe_isolation, find_addresses, find_peer
from dtlayout.training.progress import RankProgress, SharedStatus, new_path

POLL_S = 1.0
BEAT_S = 5.0
GRACE_S = 2 * BEAT_S
"""For nodes to say what their ranks do; each hears within a beat that it is asked."""
SETTLE_S = 2.0
"""Between a connection that is lost and a process that is seen to be gone."""
ASLEEP_S = 5.0
"""By which a look may be late; more, and the process that looks was itself stopped."""
SPARE_S = 20.0
"""By which the limits of process groups are longer than a watch's, so that it speaks first."""

_T = TypeVar("_T")

_BLAME_ORDER = ("gone", "failed", "refused", "silent", "stopped", "cut off", "running")
"""States, those to blame first: [Note: who is at fault]."""
_PLAIN = ("gone", "failed")
"""States that leave no doubt."""
_LOST = ("connection", "broken pipe", "timed out", "nccl", "gloo")
"""What messages of RuntimeErrors have, in small letters, that are about another rank."""


class Culprit(NamedTuple):
    """Which rank is at fault, and how."""

    rank: int
    state: str
    """Of `_BLAME_ORDER`."""
    line: str
    """For people."""


def judge(nodes: Sequence[Node]) -> Culprit:
    """Find the rank that is at fault: [Note: who is at fault]."""
    all_ranks = [
        (node, replace(record, state="silent") if node.is_silent else record)
        for node in nodes for record in node.records
    ]  # fmt: skip
    if not all_ranks:
        return Culprit(-1, "running", "no rank is left")
    node, found = min(
        all_ranks,
        key=lambda pair: (_BLAME_ORDER.index(pair[1].state), pair[1].waits, -pair[1].age_s, pair[1].rank),
    )
    what = {
        "gone": f"is gone: its process ended without a word, killed perhaps; it was in {found.where}",
        "failed": f"failed in {found.where}: {found.reason}",
        "refused": f"ended in {found.where}: {found.reason}",
        "silent": f"is out of reach{_name_others(node, found)}; last heard of in {found.where}",
        "stopped": f"is stopped by a signal, for {found.age_s:.0f} s, in {found.where}",
        "cut off": f"lost a connection in {found.where}: {found.reason}",
        "running": f"stood still first, for {found.age_s:.0f} s, in {found.where}",
    }
    line = f"rank {found.rank} on {node.host} {what[found.state]}"
    link = describe_cut_links(nodes) if found.state == "cut off" else ""
    link = describe_isolation(nodes) if found.state == "silent" else link
    return Culprit(found.rank, found.state, f"{link}: {line}" if link else line)


def judge_alone(own: Node, waited_s: float) -> Culprit:
    """What is at fault where a node hears of no other one: a rank of its own that shows it, else its link."""
    verdict = judge([own])
    unheard = f"nothing was heard of other nodes within {waited_s:.0f} s"
    if verdict.state not in ("cut off", "running") or not own.records:
        return verdict._replace(line=f"{verdict.line}; {unheard}")
    found = next(record for record in own.records if record.rank == verdict.rank)
    return verdict._replace(
        line=f"the link of {own.host}, or that of the host of rank 0, is cut: {unheard}; rank {found.rank} was in "
        f"{found.where}"
    )


def _to_json(node: Node) -> str:
    return json.dumps(asdict(node))


def _parse(text: bytes, *, is_silent: bool) -> Node:
    """What a node has left in the store."""
    value = json.loads(text)
    return Node(**{**value, "records": [RankProgress(**each) for each in value["records"]], "is_silent": is_silent})


def _name_others(node: Node, found: RankProgress) -> str:
    others = sorted(record.rank for record in node.records if record.rank != found.rank)
    return f", with {', '.join(map(str, others))} of the same node" if others else ""


class Watchdog:
    """What this rank does, for all to see, and what becomes of the others."""

    def __init__(
        self, store: dist.Store, timeout_s: float, patience_s: float, *, note: Callable[[str, bool], None], flight: Path
    ):
        """All ranks make one, over a store that is this start's alone.

        A rank that stands still for `timeout_s` ends, or for `patience_s` where it reads or writes much.
        `note` gets the line about the rank at fault, and whether that refused to go on, on one rank; `flight` is the
        folder for NCCL's flight records.
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
        self._board = self._open_board(rank, local_rank, num_local)
        self._is_over = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def _open_board(self, rank: int, local_rank: int, num_local: int) -> SharedStatus:
        key = f"board/{self._node}"
        if self._is_first:
            self._store.set(key, str(new_path()))
        path = Path(self._store.get(key).decode())
        board = SharedStatus(path, num_local, local_rank=local_rank, rank=rank)
        if self._store.add(f"{key}/open", 1) == num_local:
            path.unlink()  # all have it open: nothing is left of it, however they end
        return board

    def at(self, doing: str, *, is_long: bool = False, waits: bool = False) -> None:
        """From now on this rank does this, which may take long or not, or is to wait for other ranks."""
        self._board.write(doing, waits=waits)
        self._limit_s = self._patience_s if is_long else self._timeout_s

    def begin_step(self, step: int) -> None:
        """What follows is part of a step, from 1."""
        self._board.step = step
        self.at("beginning")

    def at_action(self, action: Action | None) -> None:
        """From now on this rank does an action of its schedule, or after the last one what follows it."""
        self.at("the update" if action is None else action.describe())

    def note_refusal(self, reason: str) -> None:
        """This process is about to end, and for this reason."""
        self._board.fail("refused", reason)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """An error that other ranks may have caused ends this process, with the traceback only if it is its own."""
        if isinstance(error, DtlayoutError):
            self._board.fail("refused", str(error).splitlines()[0])
            if _is_about_another(error.__cause__) and self._settle():  # torchrun may start it again
                self._end()
        elif isinstance(error, Exception):
            name, (first, *_) = type(error).__name__, str(error).splitlines() or [""]
            state, peer = ("cut off", find_peer(str(error))) if _is_about_another(error) else ("failed", "")
            self._board.fail(state, f"{name}: {first}", peer)
            if not self._is_alone:
                self._end(error)
            self._note(judge([self._read_node()]).line, False)
        else:
            self._board.leave()
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        """What the thread does: see whether something is wrong."""
        looked = next_beat = awake = time.monotonic()
        while not self._is_over.wait(POLL_S):
            now = time.monotonic()
            awake = now if now - looked > POLL_S + ASLEEP_S else awake  # the process itself was stopped for a while
            is_stuck = now - max(self._board.since, awake) > self._limit_s
            if is_stuck or self._board.culprit is not None or self._sees_a_loss():
                self._end()
            if self._num_nodes > 1 and self._is_first and now >= next_beat:
                next_beat = now + BEAT_S
                if _within(BEAT_S, self._beat):
                    self._end()
            looked = time.monotonic()

    def _sees_a_loss(self) -> bool:
        return any(record.state in _PLAIN for record in self._board.read())

    def _settle(self) -> bool:
        """Whether a loss is seen, now or soon."""
        deadline = time.monotonic() + SETTLE_S
        while not (is_seen := self._sees_a_loss()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return is_seen

    def _beat(self) -> bool:
        """Leave a word of this node; whether another one has asked what is wrong."""
        self._store.set(f"node/{self._node}", _to_json(self._read_node()))
        return bool(self._store.check(["asked"]))

    def _read_node(self) -> Node:
        return Node(host=socket.gethostname(), records=self._board.read(), addresses=self._addresses)

    def _end(self, error: Exception | None = None) -> None:
        """Say whose fault it is, once a node, and end this process; its error is shown if it is its own."""
        with self._ending:  # for ever, if the other thread is at it
            try:
                culprit = self._find_culprit()
                self._write_flight_record()
                if error is not None and culprit == self._board.rank:
                    traceback.print_exception(error)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(EXIT_CRASHED)  # NCCL, and threads that save, would wait for ranks that do not come

    def _find_culprit(self) -> int | None:
        """The rank that is at fault, as one of the node has found; that one says so. None if nobody did in time."""
        deadline = time.monotonic() + SETTLE_S + GRACE_S + 2 * BEAT_S
        while (culprit := self._board.culprit) is None and time.monotonic() < deadline:
            if self._board.claim():
                return self._speak()
            time.sleep(0.05)
        return culprit

    def _speak(self) -> int:
        """Find the rank that is at fault, say so, and end it where it is here and cannot end itself."""
        self._settle()
        own = self._read_node()
        limit_s = GRACE_S + BEAT_S
        verdict, is_judge = judge([own]), True
        if self._num_nodes > 1:
            heard = _within(limit_s, lambda: self._hear(own))
            if heard is None:
                verdict, is_judge = judge_alone(own, limit_s), False
            else:
                verdict, is_judge = heard
        print(verdict.line, file=sys.stderr, flush=True)
        self._board.culprit = verdict.rank
        is_stuck = any(each.rank == verdict.rank and each.state in ("stopped", "running") for each in own.records)
        if is_stuck and verdict.rank != self._board.rank and (process := self._board.find_process(verdict.rank)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if is_judge:  # last, for the disk may be what hangs
            _within(BEAT_S, lambda: self._note(verdict.line, verdict.state == "refused"))
        return verdict.rank

    def _hear(self, own: Node) -> tuple[Culprit, bool]:
        """What the first node that asks has judged, after all have said what their ranks do; whether it is this one."""
        self._store.set(f"said/{self._node}", _to_json(own))
        self._store.set("asked", "1")
        is_judge = self._store.add("judges", 1) == 1
        if is_judge:
            if not any(record.state in _PLAIN for record in own.records):
                time.sleep(GRACE_S)
            nodes = []
            for node in range(self._num_nodes):
                for key, is_silent in ((f"said/{node}", False), (f"node/{node}", True)):
                    if self._store.check([key]):
                        nodes.append(_parse(self._store.get(key), is_silent=is_silent))
                        break
            self._store.set("verdict", json.dumps(judge(nodes)))
        return Culprit(*json.loads(self._store.get("verdict"))), is_judge

    def _write_flight_record(self) -> None:
        """What NCCL has sent and waits for, for torch's `torchfrtrace`."""
        if self._is_alone or not (dist.is_initialized() and dist.get_backend() == "nccl"):
            return

        def write() -> None:
            self._flight.mkdir(parents=True, exist_ok=True)
            trace = torch._C._distributed_c10d._dump_nccl_trace()  # type: ignore[attr-defined]  # of CUDA
            (self._flight / f"rank_{self._board.rank}").write_bytes(trace)

        _within(BEAT_S, write)


def _is_about_another(error: BaseException | None) -> bool:
    """Whether an error says that another rank is gone or does not answer."""
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)


def _within(limit_s: float, ask: Callable[[], _T]) -> _T | None:
    """What somebody answers; None if that fails or takes too long, as it does where the store's host is gone."""
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
