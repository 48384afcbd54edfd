"""A stand-in for one CUDA device: tensors stay on the CPU, and streams, events and pinned memory are kept as books.

Code that is told to work on "cuda" runs as it is. Its tensors say that they are on CUDA unless they were made in the
host's memory, and its numbers are right. What would be a race on a GPU is an error here.

[Note: what is a race]
The host and each stream have a clock: for every one of them, how much of its work has surely ended. Work on a stream
comes after all that the host had waited for when it was launched. An event carries a stream's clock to who waits for
it. Whoever touches memory must know that the last write is over, and whoever writes it that the reads are over too. The
memory of a freed tensor belongs to the stream on which it was made, so that stream must know that the others are done
with it: CUDA's allocator gives it out at once. Memory on the host is freed late enough by torch itself.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, partialmethod
from threading import current_thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import TensorBase
from torch.utils._python_dispatch import TorchDispatchMode

from dtlayout.measure.storages import each_tensor

HOST = "host"
_SHARE_MEMORY = ("detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias")
"""Operators whose result is the memory of an argument, beside those that say they are views."""
Clock = Counter[str]
"""Name of a stream or of the host → number of its pieces of work that are known to have ended."""


class Race(AssertionError):
    """Memory is touched by work that does not wait for the work before it."""


@dataclass
class Memory:
    """A storage, and who has used it."""

    made_by: str
    is_on_host: bool
    written: tuple[str, int] | None = None
    read: Clock = field(default_factory=Counter)
    """Each reader's last piece of work that read it since it was written."""


class Stream:
    """In the place of torch.cuda.Stream."""

    def __init__(self, books: "StandInCuda", name: str = ""):
        self.books = books
        self.name = name or f"stream {len(books.clocks) - 1}"
        books.clocks[self.name] = Counter()

    def wait_stream(self, other: "Stream") -> None:
        self.books.note(f"{self.name} waits for {other.name}")
        self.books.clocks[self.name] |= self.books.clocks[other.name]

    def wait_event(self, event: "Event") -> None:
        self.books.note(f"{self.name} waits for an event of {event.stream}")
        self.books.clocks[self.name] |= event.clock


class Event:
    """In the place of torch.cuda.Event."""

    def __init__(self, books: "StandInCuda", *, blocking: bool = False, enable_timing: bool = False):
        self.books, self.blocking, self.enable_timing = books, blocking, enable_timing
        self.stream, self.clock, self.at_ms = "nothing", Counter[str](), 0.0

    def record(self) -> None:
        self.stream = self.books.streams[-1].name
        self.clock = self.books.clocks[self.stream].copy()
        self.at_ms = self.books.now_ms
        self.books.note(f"{self.stream} records an event")

    def synchronize(self) -> None:
        self.books.note(f"the host waits for an event of {self.stream}")
        self.books.clocks[HOST] |= self.clock

    def elapsed_time(self, later: "Event") -> float:
        assert self.enable_timing and later.enable_timing, "torch refuses events without times"
        return later.at_ms - self.at_ms


class StandInCuda:
    """Books of one device; `with` it, torch.cuda and tensors are as its docstring says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), num_devices: int = 1):
        self.done: list[str] = []
        """What the host has told streams to do and what it waited for, in order."""
        self.pinned_by: list[str] = []
        """Name of the thread that asked for each piece of pinned memory."""
        self.clocks: dict[str, Clock] = {HOST: Counter()}
        self.streams = [Stream(self, "compute")]
        """The streams that were entered; the last one is the current stream."""
        self.now_ms = 0.0
        """The device's clock; a test sets it."""
        self.statistics = {"allocated": 0, "reserved": 0, "resets": 0}
        """What the allocator says of its peaks, bytes; a test sets them."""
        self._memories: dict[int, Memory] = {}
        self._freed: deque[int] = deque()
        self._has_told = False
        fakes: dict[str, Any] = {
            "Stream": type("Stream", (Stream,), {"__init__": partialmethod(Stream.__init__, self)}),
            "Event": type("Event", (Event,), {"__init__": partialmethod(Event.__init__, self)}),
            "stream": self._enter,
            "current_stream": lambda: self.streams[-1],
            "synchronize": self._wait_for_all,
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "device_count": lambda: num_devices,
            "get_device_capability": lambda device=None: capability,
            "reset_peak_memory_stats": self._reset,
            "max_memory_allocated": lambda: self.statistics["allocated"],
            "max_memory_reserved": lambda: self.statistics["reserved"],
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        for name in ("arange", "empty", "empty_like", "ones", "tensor", "zeros", "zeros_like"):
            monkeypatch.setattr(torch, name, partial(self._make, getattr(torch, name)))
        # Of the class in Python, so that who asks inside of torch's own operators gets torch's answers.
        at, real = torch.device("cuda", 0), Tensor.device
        sent = {
            "to": lambda x, *args, **how: self._send(x, *args, **how),
            "pin_memory": lambda x: torch.empty_like(x, pin_memory=True).copy_(x),
        }
        said = {
            "device": property(lambda x: real.__get__(x) if self.is_on_host(x) else at),
            "is_cuda": property(lambda x: not self.is_on_host(x)),
        }
        for name, each in {**sent, **said}.items():
            monkeypatch.setattr(Tensor, name, each, raising=False)
        self._to = TensorBase.to
        self._mode = _Booked(self)

    def __enter__(self) -> "StandInCuda":
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)
        self._settle()

    def note(self, line: str) -> None:
        """Write down what the host does."""
        self.done.append(line)

    def find(self, tensor: Tensor) -> Memory:
        """The memory of a tensor; what nobody has seen yet was there before, on the device."""
        storage = tensor.untyped_storage()
        self._settle()
        key = storage._cdata
        if key not in self._memories:
            self._memories[key] = Memory(made_by=self.streams[0].name, is_on_host=False)
            weakref.finalize(storage, self._freed.append, key)
        return self._memories[key]

    def is_on_host(self, tensor: Tensor) -> bool:
        return self.find(tensor).is_on_host

    def on_host(self, tensor: Tensor) -> Tensor:
        """The tensor, whose memory is the host's from now on."""
        self.allocate(tensor, on_host=True)
        return tensor

    def allocate(self, made: Tensor, *, on_host: bool = False) -> None:
        """Note new memory that nobody has written."""
        memory = self.find(made)
        memory.made_by, memory.is_on_host = HOST if on_host else self.streams[-1].name, on_host
        memory.written, memory.read = None, Counter()

    def book(self, name: str, reads: list[Tensor], writes: list[Tensor], results: list[Tensor], *, pins: bool) -> None:
        """Note a piece of work, whose result may be pinned; raise Race if it does not wait for what it needs."""
        is_hosts = bool(reads + writes) and all(self.is_on_host(each) for each in reads + writes)
        who = HOST if is_hosts else self.streams[-1].name
        if who != HOST:
            self.clocks[who] |= self.clocks[HOST]
        self.clocks[who][who] += 1
        new = [tensor for tensor in results if tensor.untyped_storage()._cdata not in self._memories]
        for tensor in new:
            memory = self.find(tensor)
            memory.made_by, memory.is_on_host = who, pins or is_hosts
        for tensor in reads:
            self._expect(who, self.find(tensor), name, writes=False)
        for tensor in writes + new:
            self._expect(who, self.find(tensor), name, writes=True)

    def _expect(self, who: str, memory: Memory, name: str, *, writes: bool) -> None:
        known = self.clocks[who]
        if memory.written is not None and known[memory.written[0]] < memory.written[1]:
            self._tell(f"{name} on {who} does not wait for what {memory.written[0]} has written")
        if not writes:
            memory.read[who] = known[who]
            return
        if late := [other for other, number in memory.read.items() if known[other] < number]:
            self._tell(f"{name} on {who} writes over what {late[0]} still reads")
        memory.written, memory.read = (who, known[who]), Counter()

    def _tell(self, race: str) -> None:
        """Raise the first race; others follow from it."""
        is_first, self._has_told = not self._has_told, True
        if is_first:
            raise Race(race)

    def _settle(self) -> None:
        """Take freed storages off the books, and raise Race if a stream was not done with one."""
        while self._freed:
            memory = self._memories.pop(self._freed.popleft())
            if memory.is_on_host:
                continue
            known = self.clocks[memory.made_by]
            users = [*memory.read.items(), *([memory.written] if memory.written else [])]
            if late := [other for other, number in users if known[other] < number]:
                self._tell(f"memory of {memory.made_by} is freed while {late[0]} uses it")

    def _make(self, make: Callable[..., Tensor], *args: Any, **how: Any) -> Tensor:
        """What a function of torch makes, on the CPU in place of CUDA and of pinned memory, which only CUDA gives."""
        if str(how.get("device", "")).startswith("cuda"):
            how["device"] = "cpu"
        pins = how.pop("pin_memory", False)
        made = make(*args, **how)
        if pins:
            self.pinned_by.append(current_thread().name)
            self.allocate(made, on_host=True)
        return made

    def _send(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`Tensor.to`; to CUDA it is a copy in the order of the current stream."""
        if args and str(args[0]).startswith("cuda"):
            return torch.empty_like(x).copy_(x, **kwargs)
        return self._to(x, *args, **kwargs)

    @contextmanager
    def _enter(self, stream: Stream) -> Iterator[None]:
        self.streams.append(stream)
        yield
        self.streams.pop()

    def _wait_for_all(self) -> None:
        self.note("the host waits for all")
        for clock in [*self.clocks.values()]:
            self.clocks[HOST] |= clock

    def _reset(self) -> None:
        self.statistics["resets"] += 1
        self.statistics["allocated"] = 0


class _Booked(TorchDispatchMode):
    """Each operator as a piece of work."""

    def __init__(self, books: StandInCuda):
        super().__init__()
        self.books = books

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.is_view or name in _SHARE_MEMORY:
            return result
        if name.startswith("empty"):
            self.books.allocate(result)
            return result
        writes, reads = list[Tensor](), [*each_tensor(kwargs)]
        for given, argument in zip(args, func._schema.arguments, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(each_tensor(given))
        leaves = name == "copy_to_host"
        if leaves or (name == "copy_" and self.books.is_on_host(args[0]) != self.books.is_on_host(args[1])):
            assert leaves or args[2:] == (True,), "a copy between host and device for which the host waits"
            self.books.note(f"{self.books.streams[-1].name} copies")
        self.books.book(name, reads, writes, [*each_tensor(result)], pins=leaves)
        return result
