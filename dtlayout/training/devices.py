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


def open_device(wanted: str, gpu: str) -> Device:
    """The device that `train.device` and `cluster.gpu` ask for; on CUDA this rank takes the GPU of its local rank."""
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise InvalidConfig(
            "train.device='cuda', but torch finds no CUDA device here; use train.device='cpu' or 'auto'"
        )
    if wanted == "cpu" or not has_cuda:
        known = None if gpu in ("auto", "cpu") else find_gpu(gpu)
        return Device("cpu", "cpu", known.peak_flops_per_s if known else None)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    name = torch.cuda.get_device_name()
    known = _find_type(name, gpu)
    return Device("cuda", name, known.peak_flops_per_s if known else None, torch.cuda.get_device_capability())


def find_predicted_gpu(device: Device, wanted: str) -> Gpu | None:
    """The type that predictions are for: what `cluster.gpu` names or the device says it is; None if nobody knows.

    On a CPU it is the CPU: a run there is none of a named GPU, whose name counts for the peak of MFU alone.
    """
    return find_gpu("cpu") if device.type == "cpu" else _find_type(device.name, wanted)


def _find_type(device_name: str, wanted: str) -> Gpu | None:
    if wanted == "auto":
        return find_gpu_by_device(device_name)
    return None if wanted == "cpu" else find_gpu(wanted)


def join_ranks(device: Device, timeout_s: float) -> None:
    """Initialise torch.distributed from torchrun's environment; alone, as a world of one rank."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    # No device_id: with it all messages of a pipeline rank would share one stream.
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
