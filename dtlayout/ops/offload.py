"""Copies of a device's tensors to the host's memory by one operator, so that memory trackers see where they lie."""

import torch
from torch import Tensor

COPY_TO_HOST = "dtlayout.copy_to_host.default"
"""Name of the operator whose result lies in the host's memory, whatever device it says: a CPU has no other."""


@torch.library.custom_op("dtlayout::copy_to_host", mutates_args=())
def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory. From a GPU it is pinned, and filled once the current stream has got there."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


@copy_to_host.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")
