"""Activations on their way to the host and back: none is read too early, or freed while it is read."""

import pytest
import torch
from cuda import Event, Race, StandInCuda, Stream
from torch import Tensor, nn

from dtlayout.plans import offload
from dtlayout.plans.offload import ActivationOffloader

WIDTH = 16
"""Tensors of a block, 16 · 16 in fp64, are larger than what is left where it is."""


def make_blocks(offloader: ActivationOffloader | None) -> nn.ModuleList:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3))
    for i, block in enumerate(blocks.double() if offloader else ()):
        block.forward = offloader.wrap(block.forward, block, is_first=i == 0, is_last=i == 2)  # type: ignore[union-attr]
    return blocks.double()


def train(blocks: nn.ModuleList, offloader: ActivationOffloader | None, num_microbatches: int = 2) -> list[Tensor]:
    """Gradients after all forwards, and then all backwards."""
    passes = [(is_forward, 0, m) for is_forward in (True, False) for m in range(num_microbatches)]
    losses = {}
    for work, following in zip(passes, [*passes[1:], None], strict=True):
        if offloader:
            offloader.before_work(work, following)
        is_forward, _, m = work
        if is_forward:
            x = torch.full((WIDTH, WIDTH), 1.0 + m, dtype=torch.float64) + torch.zeros(1, dtype=torch.float64)
            for block in blocks:
                x = block(x)
            losses[m] = x.square().sum()
        else:
            losses.pop(m).backward()
    return [p.grad for p in blocks.parameters() if p.grad is not None]


def test_on_cuda_tensors_go_and_return_on_two_streams_and_nothing_is_touched_too_early(cuda: StandInCuda) -> None:
    offloader = ActivationOffloader("cuda")
    found = train(make_blocks(offloader), offloader)
    expected = train(make_blocks(None), None)
    assert len(found) == 12 and all(map(torch.equal, found, expected))
    assert offloader.to_host_stream is not None and offloader.to_device_stream is not None
    there, back = (f"{stream.name} copies" for stream in (offloader.to_host_stream, offloader.to_device_stream))
    assert cuda.done.count(there) == cuda.done.count(back) > 8
    assert not [line for line in cuda.done if line.startswith("the host waits")]


@pytest.mark.parametrize(
    ("left_out", "told"),
    [
        ("wait_stream", "copy_to_host on stream 1 does not wait for what compute has written"),
        ("wait_event", "memory of compute is freed while stream 1 uses it"),
        ("record", "memory of compute is freed while stream 1 uses it"),
    ],
)
def test_the_stand_in_sees_each_wait_that_is_left_out(cuda: StandInCuda, monkeypatch, left_out: str, told: str) -> None:
    monkeypatch.setattr(Event if left_out == "record" else Stream, left_out, lambda *_: None)
    offloader = ActivationOffloader("cuda")
    with pytest.raises(Race, match=told):
        train(make_blocks(offloader), offloader)


def test_the_stand_in_sees_tensors_that_are_read_before_they_have_returned(cuda: StandInCuda, monkeypatch) -> None:
    offloader, wait = ActivationOffloader("cuda"), offload._wait_for
    blocks = make_blocks(offloader)
    monkeypatch.setattr(offload, "_wait_for", lambda done: wait(done) if done and done.stream == "stream 1" else None)
    with pytest.raises(Race, match="on compute does not wait for what stream 2 has written"):
        train(blocks, offloader)


def test_a_cpu_has_no_streams() -> None:
    offloader = ActivationOffloader("cpu")
    assert (offloader.to_host_stream, offloader.to_device_stream) == (None, None)
    assert all(map(torch.equal, train(make_blocks(offloader), offloader), train(make_blocks(None), None)))
