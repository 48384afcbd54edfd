"""The device of this rank, and what it can tell about itself."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dtlayout.cluster import Gpu, find_gpu, find_gpu_by_device
from dtlayout.errors import InvalidConfig


@dataclass(frozen=True)
class Device:
    """Where this rank computes."""

    type: str
    """cpu or cuda."""
    name: str
    """What torch calls it."""
    peak_flops_per_s: float | None
    """Dense bf16 peak, where a constants file knows it."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability."""


def open_device(wanted: str, known: Gpu | None) -> Device:
    """The device that `train.device` asks for; on CUDA this rank takes the GPU of its local rank.

    `known` is the type that [cluster] names, None if it is to be asked. A CPU has a peak, and so an MFU, only where
    that is a GPU to compare it to.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise InvalidConfig(
            "train.device='cuda', but torch finds no CUDA device here; use train.device='cpu' or 'auto'"
        )
    if wanted == "cpu" or not has_cuda:
        return Device("cpu", "cpu", known.peak_flops_per_s if known and known.has_mfu else None)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    name = torch.cuda.get_device_name()
    found = _find_type(name, known)
    return Device("cuda", name, found.peak_flops_per_s if found else None, torch.cuda.get_device_capability())


def find_predicted_gpu(device: Device, known: Gpu | None) -> Gpu | None:
    """The type that predictions are for: what [cluster] names or the device says it is; None if nobody knows.

    On a CPU it is the CPU: a run there is none of a named GPU, whose name counts for the peak of MFU alone.
    """
    if device.type == "cpu":
        return known if known and known.device_type == "cpu" else find_gpu("cpu")
    return _find_type(device.name, known)


def _find_type(device_name: str, known: Gpu | None) -> Gpu | None:
    if known is None:
        return find_gpu_by_device(device_name)
    return None if known.device_type == "cpu" else known


def join_ranks(device: Device, timeout_s: float) -> None:
    """Initialise torch.distributed from torchrun's environment; alone, as a world of one rank."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    # No device_id: with it all messages of a pipeline rank would share one stream.
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
