"""Copies between host and GPU without waiting on the host; on a CPU nothing is copied."""

import torch
from torch import Tensor


def send_to_device(tensor: Tensor, device_type: str) -> Tensor:
    """A host's tensor on the device; the copy runs after the device's earlier work, and the host does not wait."""
    if device_type == "cpu":
        return tensor
    return tensor.pin_memory().to(device_type, non_blocking=True)  # torch keeps what it pinned until it is copied


class OnHost:
    """A device's tensor on its way to the host; it arrives without waiting for work that the device gets later."""

    def __init__(self, tensor: Tensor):
        self._copy = tensor
        self._has_arrived: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._has_arrived = torch.cuda.Event()
            self._has_arrived.record()

    def wait(self) -> Tensor:
        """The tensor on the host."""
        if self._has_arrived is not None:
            self._has_arrived.synchronize()
        return self._copy
