"""The device of this rank, as torch finds it."""

import os
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from dtlayout.cluster import Gpu
from dtlayout.device import Device, describe_cpu, describe_gpu
from dtlayout.errors import InvalidConfig
from dtlayout.kernel import find_packages
from dtlayout.signals import Stopped, StopRequest


def repeat_bits(wanted: str) -> None:
    """Let CUDA run deterministic kernels alone, where a run with this `train.device` uses it; a CPU needs nothing.

    Before `open_device`, for cuBLAS reads its workspace's sizes when CUDA starts; those that are set already stay.
    """
    if wanted == "cpu" or not torch.cuda.is_available():
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a pass over each result
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False  # whose choice is another one each time


def open_device(wanted: str, known: Gpu | None) -> Device:
    """The device that `train.device` asks for; on CUDA this rank takes the GPU of its local rank.

    `known` is the type that [cluster] names, None if it is to be asked. InvalidConfig where there is no such device, on
    every rank of a node that has more ranks than GPUs.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise InvalidConfig(
            "train.device='cuda', but torch finds no CUDA device here; use train.device='cpu' or 'auto'"
        )
    if wanted == "cpu" or not has_cuda:
        return replace(describe_cpu(known), packages=find_packages())
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    _check_gpus(local_rank)
    torch.cuda.set_device(local_rank)
    device = describe_gpu(torch.cuda.get_device_name(), known, torch.cuda.get_device_capability())
    return replace(device, packages=find_packages())


def _check_gpus(local_rank: int) -> None:
    """InvalidConfig if this node has more ranks than GPUs; without torchrun a rank knows of its own number alone."""
    num_gpus, num_ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if num_gpus == 1 and local_rank == 0 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return  # its own, which somebody chose for it
    if local_rank >= num_gpus or num_ranks > num_gpus:
        raise InvalidConfig(
            f"{max(num_ranks, local_rank + 1)} ranks on a node on which torch finds {num_gpus} CUDA devices, one for "
            f"each rank; use at most --nproc-per-node {num_gpus}, or make more visible with CUDA_VISIBLE_DEVICES"
        )


def open_store(timeout_s: float) -> dist.Store:
    """Where the ranks of torchrun's environment leave words for each other; alone, of a world of one rank."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return store


def meet(store: dist.Store, stop: StopRequest, timeout_s: float) -> None:
    """Return once all ranks are here, or raise Stopped on all of them: [Note: signals before the first step].

    DistStoreError if some are not here in time.
    """
    stop.is_early = False  # from here on they end together
    num_here, deadline = store.add("meeting/here", 1), time.monotonic() + timeout_s
    if num_here == int(os.environ["WORLD_SIZE"]):
        store.compare_set(_AGREED, "", "go")
    while True:
        if stop.is_made:
            store.compare_set(_AGREED, "", "stop")  # what is there first counts
        try:
            store.wait([_AGREED], timedelta(seconds=_LOOK_EVERY_S))
            break
        except dist.DistStoreError:
            if time.monotonic() > deadline:
                raise
    if store.get(_AGREED) != b"go":
        raise Stopped


_AGREED = "meeting/agreed"
_LOOK_EVERY_S = 1.0
"""While torch waits, Python hears of no signal."""


def join_ranks(device: Device, timeout_s: float, store: dist.Store | None = None) -> None:
    """Initialise torch.distributed from torchrun's environment, over its store; alone, as a world of one rank."""
    store = store or open_store(timeout_s)
    # No device_id: with it all messages of a pipeline rank would share one stream.
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("default_pg", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )
