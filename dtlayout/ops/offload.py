"""Copies of a device's tensors in the host's memory, by an operator: whoever counts memory sees where they lie."""

import torch
from torch import Tensor

COPY_TO_HOST = "dtlayout.copy_to_host.default"
"""The operator whose result lies in the host's memory, whatever device it says: a CPU has no other."""


@torch.library.custom_op("dtlayout::copy_to_host", mutates_args=())
def copy_to_host(tensor: Tensor) -> Tensor:
    """A tensor in the host's memory; beside a GPU it is pinned, and filled when the current stream has come there."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


@copy_to_host.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")
