"""Copies of a rank's state: what they hold, whose memory they use, and that no update overtakes them."""

from contextlib import contextmanager
from threading import current_thread

import pytest
import torch
from torch import nn

from dtlayout.checkpoint.copies import HostCopies


def make_state() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3))
    parameter.grad = torch.ones_like(parameter)
    return parameter, torch.optim.SGD([parameter], lr=1.0)


def test_copies_keep_what_was_and_the_next_use_their_memory():
    parameter, optimizer = make_state()
    copies = HostCopies(optimizer, "cpu")
    first = copies.take({"weight": parameter.detach()})()["weight"]
    before = parameter.detach().clone()
    optimizer.step()
    assert torch.equal(first, before) and not torch.equal(parameter, before)
    second = copies.take({"weight": parameter.detach()})()["weight"]
    assert torch.equal(second, parameter) and second.data_ptr() == first.data_ptr()


class RecordedCuda:
    """In the place of torch.cuda: notes what each stream and the host are given to do, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.done: list[str] = []
        self.streams = ["default"]
        self.pinned_by: list[str] = []
        recorded = self

        class Stream:
            name = "side"

            def wait_stream(self, other: "Stream") -> None:
                recorded.done.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: "Event") -> None:
                recorded.done.append(f"{self.name} waits for event")

        class Event:
            def __init__(self, *, blocking: bool):
                assert blocking, "a thread that polls takes the host's time"

            def record(self) -> None:
                recorded.done.append(f"{recorded.streams[-1]} records event")

            def synchronize(self) -> None:
                recorded.done.append("host waits for event")

        default = Stream()
        default.name = "default"

        @contextmanager
        def stream(entered: Stream):
            recorded.streams.append(entered.name)
            yield
            recorded.streams.pop()

        for name, fake in (("Stream", Stream), ("Event", Event), ("stream", stream)):
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: default)
        empty_like, copy = torch.empty_like, torch.Tensor.copy_

        def make_pinned(tensor, *, device, pin_memory):
            assert pin_memory, "a copy to other memory stops the host"
            self.pinned_by.append(current_thread().name)
            return empty_like(tensor, device=device)

        def note(to, source, *, non_blocking):
            assert non_blocking
            recorded.done.append(f"{recorded.streams[-1]} copies")
            return copy(to, source)

        monkeypatch.setattr(torch, "empty_like", make_pinned)
        monkeypatch.setattr(torch.Tensor, "copy_", note)


def test_on_cuda_the_device_copies_beside_the_next_step_and_only_its_update_waits(monkeypatch):
    parameter, optimizer = make_state()
    with monkeypatch.context() as patch:
        cuda = RecordedCuda(patch)
        copies = HostCopies(optimizer, "cuda")
        wait = copies.take({"weight": parameter.detach()})
        assert cuda.done == ["side waits for default", "side copies", "side records event"]
        for _ in range(2):  # the second update waits for nothing
            optimizer.step()
        assert cuda.done[3:] == ["default waits for event"]
        wait()
        assert cuda.done[4:] == ["host waits for event"]


def test_on_cuda_memory_is_pinned_in_a_thread_of_its_own_and_only_what_lacks_later(monkeypatch):
    parameter, optimizer = make_state()
    with monkeypatch.context() as patch:
        cuda = RecordedCuda(patch)
        copies = HostCopies(optimizer, "cuda")
        assert copies.prepare({"weight": parameter.detach()}) == 24
        tensors = {"weight": parameter.detach(), "late": parameter.detach().clone()}
        taken = copies.take(tensors)()
        assert cuda.pinned_by == ["pinning memory", current_thread().name]
        assert all(torch.equal(taken[name], parameter) for name in tensors)


def test_a_cpu_prepares_nothing():
    parameter, optimizer = make_state()
    assert HostCopies(optimizer, "cpu").prepare({"weight": parameter.detach()}) == 0
