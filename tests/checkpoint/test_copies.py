"""Copies of a rank's state: what they hold, whose memory they use, and that no update overtakes them."""

from threading import current_thread

import pytest
import torch
from cuda import Race
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


def test_on_cuda_the_device_copies_beside_the_next_step_and_only_its_update_waits(cuda):
    parameter, optimizer = make_state()
    copies = HostCopies(optimizer, "cuda")
    before = parameter.detach().clone()
    wait = copies.take({"weight": parameter.detach()})
    side = copies._stream.name
    assert cuda.done == [f"{side} waits for compute", f"{side} copies", f"{side} records an event"]
    for _ in range(2):  # the second update waits for nothing
        optimizer.step()
    assert cuda.done[3:] == [f"compute waits for an event of {side}"]
    assert torch.equal(wait()["weight"], before)
    assert cuda.done[4:] == [f"the host waits for an event of {side}"]
    assert copies._made is None, "the update that it held back is done"


@pytest.mark.parametrize(
    ("left_out", "told"),
    [("_hold_update", "writes over what stream 1 still reads"), ("_wait", "on host does not wait for what stream 1")],
)
def test_an_update_or_a_reader_that_does_not_wait_is_a_race(cuda, monkeypatch, left_out, told):
    """So that the test above would see it."""
    monkeypatch.setattr(HostCopies, left_out, lambda copies, *given: copies._copies if left_out == "_wait" else None)
    parameter, optimizer = make_state()
    wait = HostCopies(optimizer, "cuda").take({"weight": parameter.detach()})
    with pytest.raises(Race, match=told):
        optimizer.step()
        wait()["weight"].sum()


def test_on_cuda_memory_is_pinned_in_a_thread_of_its_own_and_only_what_lacks_later(cuda):
    parameter, optimizer = make_state()
    copies = HostCopies(optimizer, "cuda")
    assert copies.prepare({"weight": parameter.detach()}) == 24
    tensors = {"weight": parameter.detach(), "late": parameter.detach().clone()}
    taken = copies.take(tensors)()
    assert cuda.pinned_by == ["pinning memory", current_thread().name]
    assert all(torch.equal(taken[name], parameter) for name in tensors)


def test_a_cpu_prepares_nothing():
    parameter, optimizer = make_state()
    assert HostCopies(optimizer, "cpu").prepare({"weight": parameter.detach()}) == 0
