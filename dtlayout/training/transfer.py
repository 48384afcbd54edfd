"""Copies between host and GPU for which the host does not wait. On a CPU there is nothing to copy."""

import torch
from torch import Tensor


def send_to_device(tensor: Tensor, device_type: str) -> Tensor:
    """A tensor of the host on the device, once the device has done what it was given before."""
    if device_type == "cpu":
        return tensor
    return tensor.pin_memory().to(device_type, non_blocking=True)  # torch keeps what it pinned until it is copied


class OnHost:
    """A device's tensor on its way to the host; what the device is given after it need not be done when it is there."""

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
