"""Kernels that really ran, whatever was asked for: found by the names that PyTorch's profiler notes.

The profiler sees operators on the host and, with CUDA, kernels on the device, under torch.compile too. Some kernels
have no name of their own: separate operations of a norm or a rotary embedding are operators like any others, and
compiled code melts them together.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import torch
from torch._C._autograd import _KinetoEvent
from torch.profiler import ProfilerActivity, profile

from dtlayout.spec.kernel_records import Kernel
from dtlayout.spec.kernel_table import list_kernels


def list_traces() -> dict[str, dict[str, str]]:
    """Operation → pattern of a name in forward → kernel, for all kernels that can be told by such names.

    aten's only operator for flash attention on CUDA is not among them: its name is the same for every implementation.
    """
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for kernel in list_kernels(Kernel):
        found[kernel.operation] |= dict.fromkeys(kernel.traces, kernel.name.removeprefix("sdpa-"))
    return {operation: patterns for operation, patterns in found.items() if patterns}


class KernelRecorder:
    """Counts what runs inside the `with` block; a recomputed call counts again.

    Only one profiler can run at a time.
    """

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {operation: Counter() for operation in list_traces()}
        """Operation → kernel → calls."""

    @property
    def executed(self) -> dict[str, list[str]]:
        """Operation → its kernels that ran, as far as names tell."""
        return {operation: sorted(counts) for operation, counts in self.counts.items()}

    def __enter__(self) -> "KernelRecorder":
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes to stderr when it starts and when it stops
        on_device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        # The profiler has one cycle; torch 2.11 warns that events of earlier cycles get lost, unless told to keep them
        # all.
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_device], acc_events=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)
        profiler = self._profile.profiler
        assert profiler is not None and profiler.kineto_results is not None, "it has run"
        # Not the profile's own `events()`: that makes a tree of all that ran, 0.1 ms an operator.
        by_name: dict[str, list[_KinetoEvent]] = defaultdict(list)
        for event in profiler.kineto_results.events():
            by_name[event.name()].append(event)
        compiling = [event for name in by_name if name.endswith(_COMPILING) for event in by_name[name]]
        for name, operation, kernel in _match(by_name):
            if ran := sum(event.name() == name for event in _outermost([*compiling, *by_name[name]])):
                self.counts[operation][kernel] += ran


_COMPILING = "(dynamo_timed)"
"""End of the names of torch.compile's own work; inside it operators are traced, not run."""


def _match(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Name, operation and kernel, for each of `names` that belongs to a kernel."""
    for name, (operation, patterns) in product(names, list_traces().items()):
        yield from ((name, operation, kernel) for pattern, kernel in patterns.items() if re.search(pattern, name))


def _outermost(events: Iterable[_KinetoEvent]) -> Iterator[_KinetoEvent]:
    """Events that lie in no other event of their thread or stream: an operator may pass the dispatcher twice."""
    last_place, last_end = None, 0
    for event in sorted(events, key=lambda e: (_place(e), e.start_ns(), -e.end_ns())):
        if _place(event) != last_place or event.start_ns() >= last_end:
            yield event
            last_place, last_end = _place(event), event.end_ns()


def _place(event: _KinetoEvent) -> tuple[str, int]:
    return str(event.device_type()), event.device_resource_id()
