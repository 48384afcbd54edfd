"""The device of this rank, found by torch."""

import os
from dataclasses import replace

import torch

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.formatting import plural
from dtlayout.spec.cluster import Gpu
from dtlayout.spec.device import Device, describe_cpu, describe_gpu
from dtlayout.spec.kernel_table import find_packages

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of the allocator's settings: the name that torch wants, and the one that it still reads."""


def repeat_bits(wanted: str) -> None:
    """Allow only deterministic kernels on CUDA, if a run with this `train.device` uses it; a CPU needs nothing.

    Call it before `open_device`, since cuBLAS reads the sizes of its workspace when CUDA starts. Sizes that the
    environment sets already stay.
    """
    if wanted == "cpu" or not torch.cuda.is_available():
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a pass over each result
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # whose choice is another one each time


def refuse_missing(wanted: str) -> None:
    """InvalidConfig if there is no device of the type that `train.device` asks for."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(
            "train.device='cuda', but torch finds no CUDA device here; use train.device='cpu' or 'auto'"
        )


def open_device(wanted: str, known: Gpu | None) -> Device:
    """The device that `train.device` asks for; on CUDA, the GPU with the number of this local rank.

    `known` is the GPU type that [cluster] names; with None the device is asked. InvalidConfig if there is no such
    device, and on every rank of a node that has more ranks than GPUs.
    """
    refuse_missing(wanted)
    has_cuda = torch.cuda.is_available()
    if wanted == "cpu" or not has_cuda:
        return replace(describe_cpu(known), packages=find_packages())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    _check_gpus(local_rank)
    grow_segments()
    torch.cuda.set_device(local_rank)
    device = describe_gpu(torch.cuda.get_device_name(), known, torch.cuda.get_device_capability())
    return replace(device, packages=find_packages())


def grow_segments() -> None:
    """Have CUDA's allocator grow its segments, so that freed memory of one size serves another; before CUDA starts.

    What the environment says stays, under either name that torch reads.
    """
    if not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        os.environ[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def wait_for_device(device_type: str) -> None:
    """Wait until the device has done all that it was given; a CPU's work is done at once."""
    if device_type == "cuda":
        torch.cuda.synchronize()


def _check_gpus(local_rank: int) -> None:
    """InvalidConfig if this node has more ranks than GPUs; without torchrun a rank knows only its own number."""
    num_gpus, num_ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if num_gpus == 1 and local_rank == 0 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return  # its own, which somebody chose for it
    if local_rank >= num_gpus or num_ranks > num_gpus:
        raise InvalidConfig(
            f"{plural(max(num_ranks, local_rank + 1), 'rank')} on a node on which torch finds "
            f"{plural(num_gpus, 'CUDA device')}, one for each rank; use at most --nproc-per-node "
            f"{num_gpus}, or make more visible with CUDA_VISIBLE_DEVICES"
        )
