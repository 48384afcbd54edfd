"""Device: where something runs, as far as it is known. Before torch is asked that is what the configuration says."""

import os
from dataclasses import dataclass
from typing import Literal

from dtlayout.base.cgroups import find_memory_limit
from dtlayout.spec.cluster import Gpu, find_gpu, find_gpu_by_device, gpu_named, is_slice

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Device:
    """A rank's device; what is not known of it refuses nothing."""

    type: Literal["cpu", "cuda", "auto"] = "auto"
    """What torch calls its kind; auto where only torch can tell."""
    name: str = ""
    """What torch calls it."""
    peak_flops_per_s: float | None = None
    """Dense bf16 peak that MFU is measured against; a CPU's is that of the GPU that [cluster] names, if it does."""
    capability: tuple[int, ...] = ()
    """CUDA's compute capability, major and minor; empty if it is not known."""
    gpu: Gpu | None = None
    """The type that predictions are for, the CPU included; None if its numbers are not known."""
    packages: frozenset[str] | None = None
    """Modules of optional packages that can be imported there, `kernel.find_packages`; None if nobody has looked."""


def expect_device(wanted: Literal["cpu", "cuda", "auto"], known: Gpu | None) -> Device:
    """What a run with `train.device` will find, as far as that can be told without torch.

    `known` is the type that [cluster] names, None if it is to be asked. An auto is of that type; without one only torch
    can tell.
    """
    if wanted == "cpu" or (wanted == "auto" and known is not None and known.device_type == "cpu"):
        return describe_cpu(known)
    if known is None:
        return Device(wanted)
    return describe_gpu(known.name, known, known.capability)


def device_of(gpu: Gpu) -> Device:
    """A device of this type; which packages are there is not known."""
    return expect_device("auto", gpu)


def describe_cpu(known: Gpu | None) -> Device:
    """A CPU. A run there is none of a GPU that [cluster] names, which counts for the peak of MFU alone."""
    if known is None or known.device_type == "cpu":
        return Device("cpu", "cpu", gpu=known or find_gpu("cpu"))
    return Device("cpu", "cpu", known.peak_flops_per_s, gpu=find_gpu("cpu"))


def describe_gpu(name: str, known: Gpu | None, capability: tuple[int, ...]) -> Device:
    """A GPU that torch calls `name`: of the type that [cluster] names, else of the one that reports itself so.

    A slice of a GPU is of no type, unless [cluster] says what its own peak is.
    """
    gpu = find_gpu_by_device(name) if known is None else known if known.device_type == "cuda" else None
    if gpu is not None and is_slice(name) and gpu.peak_flops_per_s == gpu_named(gpu.name).peak_flops_per_s:
        gpu = None
    return Device("cuda", name, gpu.peak_flops_per_s if gpu else None, capability, gpu)


def find_host_bytes() -> int:
    """Memory that the processes of this host may have together: all of it, or what a container or a job is given."""
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = find_memory_limit()
    return nbytes if limit is None else min(nbytes, limit)
