"""Device: the kind of device on which something runs, as far as the config says before torch is asked."""

import os
from dataclasses import dataclass
from typing import Literal

from dtlayout.base.cgroups import find_memory_limit
from dtlayout.base.refusals import Refusal
from dtlayout.spec.cluster import Gpu, find_gpu, find_gpu_by_device, gpu_named, is_slice
from dtlayout.spec.optimizers import Optimizer
from dtlayout.spec.precision import Precision

DeviceType = Literal["cpu", "cuda"]
_FIRST_WITH_BF16 = 8
"""First number of the compute capability from which on GPUs multiply bf16."""
_FIRST_FP8 = (8, 9)
"""First compute capability of GPUs that multiply in fp8."""


@dataclass(frozen=True)
class Device:
    """A rank's device. A fact that is not known refuses nothing."""

    type: Literal["cpu", "cuda", "auto"] = "auto"
    """Kind of device, as torch names it; auto where only torch can tell."""
    name: str = ""
    """Name of the device, as torch reports it."""
    peak_flops_per_s: float | None = None
    """Dense bf16 FLOP/s against which MFU is measured. A CPU has the peak of the GPU that [cluster] names, if any."""
    capability: tuple[int, ...] = ()
    """CUDA's compute capability, major and minor; empty if it is not known."""
    gpu: Gpu | None = None
    """GPU type for which predictions are made; the CPU is one. None if its numbers are not known."""
    packages: frozenset[str] | None = None
    """Modules of optional packages that can be imported there (`kernel_table.find_packages`); None if nobody has
    looked."""


def expect_device(wanted: Literal["cpu", "cuda", "auto"], known: Gpu | None) -> Device:
    """The device of a run with `train.device`, as far as it can be told without torch.

    `known` is the GPU type that [cluster] names, None if the device is to be asked. An auto is of that type; without a
    type only torch can tell.
    """
    if wanted == "cpu" or (wanted == "auto" and known is not None and known.device_type == "cpu"):
        return describe_cpu(known)
    if known is None:
        return Device(wanted)
    return describe_gpu(known.name, known, known.capability)


def device_of(gpu: Gpu) -> Device:
    """A device of this type; its packages are not known."""
    return expect_device("auto", gpu)


def describe_cpu(known: Gpu | None) -> Device:
    """The CPU as a device; `known` is the type that [cluster] names. A GPU there only gives the peak for MFU."""
    if known is None or known.device_type == "cpu":
        return Device("cpu", "cpu", gpu=known or find_gpu("cpu"))
    return Device("cpu", "cpu", known.peak_flops_per_s, gpu=find_gpu("cpu"))


def describe_gpu(name: str, known: Gpu | None, capability: tuple[int, ...]) -> Device:
    """The GPU that torch calls `name`, as a device; `known` is the type that [cluster] names.

    Without a known type, it is of the type that reports this name. A slice of a GPU is of no type, unless [cluster]
    gives the slice a peak of its own.
    """
    gpu = find_gpu_by_device(name) if known is None else known if known.device_type == "cuda" else None
    if gpu is not None and is_slice(name) and gpu.peak_flops_per_s == gpu_named(gpu.name).peak_flops_per_s:
        gpu = None
    return Device("cuda", name, gpu.peak_flops_per_s if gpu else None, capability, gpu)


def check_formats(device: Device, precision: Precision) -> list[Refusal]:
    """Refusals of formats that a device is known not to multiply; a CPU computes what its kernels cast back."""
    return [*check_compute_format(device, precision.compute), *_check_matmul_format(device, precision)]


def check_compute_format(device: Device, compute: str) -> list[Refusal]:
    """A refusal of a compute format that the device is known not to multiply; empty if there is none."""
    if compute != "bfloat16" or not device.capability or not 0 < device.capability[0] < _FIRST_WITH_BF16:
        return []
    had = ".".join(map(str, device.capability))
    what = f"precision.compute=bfloat16 is nothing that {device.name}, of compute capability {had}, multiplies in"
    return [Refusal("compute", what, "use precision.compute=float16, whose loss is scaled")]


def usual_compute_format(device: Device) -> Literal["bfloat16", "float16"]:
    """The format of 16 bits in which the device multiplies: float16 on GPUs that are known to have no bfloat16."""
    return "float16" if check_compute_format(device, "bfloat16") else "bfloat16"


def check_update_format(device: Device, optimizer: Optimizer) -> list[Refusal]:
    """A refusal of an optimizer that computes in bf16 where the device is known not to multiply it."""
    part = next((part for part in optimizer.parts if part.computes_in_bf16), None)
    if part is None or not check_compute_format(device, "bfloat16"):
        return []
    what = f"optimizer.name={part.name} iterates in bfloat16, which {device.name} does not multiply"
    return [Refusal("optimizer.name", what, "use another optimizer")]


def _check_matmul_format(device: Device, precision: Precision) -> list[Refusal]:
    fmt = precision.matmul_format
    if fmt is None or device.type != "cuda":
        return []
    is_able = not device.capability or device.capability >= _FIRST_FP8
    if bool(device.gpu.peak_of(fmt)) if device.gpu else is_able:
        return []
    what = f"precision.matmuls={fmt.name} is no format that {device.name} multiplies in"
    return [Refusal("precision.matmuls", what, "use precision.matmuls=compute")]


def find_host_bytes() -> int:
    """Bytes that the processes of this host may have together: all memory, or the limit of a container or job."""
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = find_memory_limit()
    return nbytes if limit is None else min(nbytes, limit)
