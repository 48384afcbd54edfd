"""Kernels: which implementation runs each operation that has several. docs/kernels.md says what runs where."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal, get_args

from dtlayout.device import Device
from dtlayout.errors import InvalidConfig
from dtlayout.kernel import KERNELS, AttentionKernel, Kernel, Package, find_kernel
from dtlayout.precision import Precision
from dtlayout.recompute import Recompute

Compile = Literal["none", "blocks", "loss", "model"]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """A choice for each operation: the name of a record in `dtlayout.kernel`."""

    attention: str = "sdpa-flash"
    """How scaled_dot_product_attention computes; sdpa-flash is PyTorch's FlashAttention-2 on CUDA, its own on CPU, auto
    the fastest that runs. flash1, megatron-softmax and torch can be predicted, not run."""
    norm: str = "fused"
    """RMSNorm as separate operations (eager), as PyTorch's one operation (fused) or as liger-kernel's."""
    rope: str = "eager"
    """Rotary embedding as separate operations in fp32, or as liger-kernel's."""
    swiglu: str = "eager"
    """silu(gate) · up as two operations, or as liger-kernel's."""
    loss: str = "chunked"
    """Cross-entropy of all logits in fp32 (eager), chunk by chunk of them (chunked), or together with the head's
    matmul, so that no more than a chunk of logits is ever there (linear)."""
    compile: Compile = "none"
    """What torch.compile gets: each block for itself, the loss, or a whole pipeline stage."""

    def __post_init__(self) -> None:
        problems = []
        for name, value in vars(self).items():
            known = list(get_args(Compile) if name == "compile" else KERNELS[name])
            known = ["auto", *known] if name == "attention" else known
            if value not in known:
                problems.append(f"kernels.{name}={value!r} is unknown; use one of {known}")
        if problems:
            raise InvalidConfig(problems)

    @property
    def compiles_blocks(self) -> bool:
        """Whether torch.compile fuses what is elementwise in a block."""
        return self.compile in ("blocks", "model")

    @property
    def records(self) -> list[Kernel]:
        """What is known of each of them; nothing of an auto."""
        chosen = ((name, value) for name, value in vars(self).items() if name != "compile" and value != "auto")
        return [KERNELS[name][value] for name, value in chosen]

    def resolve(self, precision: Precision, device: Device) -> tuple["Kernels", str]:
        """The choices with attention's auto replaced by the fastest kernel that runs there, and why it is that one.

        What is not known of the device is taken to be missing.
        """
        if self.attention != "auto":
            return self, "asked for"
        if device.type == "cpu":
            return replace(self, attention="blockwise"), "as fast as the CPU's matmuls"
        surely = replace(device, capability=device.capability or (0, 0), packages=device.packages or frozenset())
        for name, why in _FASTEST.items():
            kernel = find_kernel(AttentionKernel, name)
            if kernel.suits(surely, precision.compute) and not kernel.is_missing(surely):
                return replace(self, attention=name), why
        raise AssertionError("the last one runs everywhere")

    def check(self, precision: Precision, device: Device, *, tp: int = 1, recompute: str = "none") -> None:
        """Raise InvalidConfig with all of `problems`."""
        if problems := self.problems(precision, device, tp=tp, recompute=recompute):
            raise InvalidConfig(problems)

    def problems(self, precision: Precision, device: Device, *, tp: int = 1, recompute: str = "none") -> list[str]:
        """Every kernel that the trainer lacks, or lacks on this device, in this format or in such a layout.

        What is not known of the device refuses nothing.
        """
        problems = []
        missing = defaultdict[Package, list[str]](list)
        for kernel in self.records:
            if not kernel.suits(device, precision.compute):
                problems.append(_describe_refusal(kernel, precision, device))
            elif kernel.package and kernel.is_missing(device):
                missing[kernel.package].append(f"kernels.{kernel.operation}={kernel.name}")
        problems += [
            f"{', '.join(names)}: no package {package.module} here; install it: {package.install}"
            for package, names in missing.items()
        ]
        return problems + (self._compile_problems(precision, device, tp, recompute) if tp > 1 else [])

    def unrepeatable(self, device: Device) -> list[str]:
        """Every kernel that gives other bits each time where the run is; for train.deterministic."""
        return [
            f"{key}={kernel.name} gives other bits each time on CUDA, and train.deterministic=true asks for the same; "
            f"use {key}={getattr(Kernels(), kernel.operation)} or train.deterministic=false"
            for kernel in self.records
            if not kernel.is_repeatable and device.type != "cpu" and (device.type == "cuda" or not kernel.cpu)
            for key in [f"kernels.{kernel.operation}"]
        ]

    def _compile_problems(self, precision: Precision, device: Device, tp: int, recompute: str) -> list[str]:
        """Where torch.compile fails on what tp splits."""
        repeated = Recompute.parse(recompute)
        is_inside = self.compile == "model" or (self.compile == "blocks" and repeated.is_selective)
        if is_inside and repeated.every and "attention" not in repeated.kept and device.type == "cpu":
            attention = find_kernel(AttentionKernel, self.resolve(precision, device)[0].attention)
            if attention.backend and not attention.holds_scores:
                return [
                    f"kernels.compile={self.compile} cannot keep the random state that layout.recompute={recompute} "
                    f"needs to run kernels.attention={self.attention} again on a CPU beside the mesh of "
                    f"layout.tp={tp}; use layout.recompute=selective or kernels.attention=sdpa-math"
                ]
        return []


def find_alternative(kernel: Kernel, precision: Precision, device: Device) -> str:
    """What could run there instead: the default, or else the first that needs no package."""
    known = KERNELS[kernel.operation]
    default = known[getattr(Kernels(), kernel.operation)]
    own = [each for each in (default, *known.values()) if each.package is None]
    return next(each.name for each in own if each.suits(device, precision.compute))


def _describe_refusal(kernel: Kernel, precision: Precision, device: Device) -> str:
    """Why a kernel does not suit a device, and what would."""
    key, compute = f"kernels.{kernel.operation}", precision.compute
    asked, other = f"{key}={kernel.name}", f"{key}={find_alternative(kernel, precision, device)}"
    formats = kernel.formats(device.type)
    if not kernel.formats():
        return f"{asked} is a kernel of other engines that can only be predicted; use {other}"
    if not formats:
        here, there = ("the CPU", "CUDA") if device.type == "cpu" else ("CUDA", "the CPU")
        return f"{asked} runs on {there} alone; use {other} on {here}"
    if kernel.is_for_others(device):
        had = ".".join(map(str, device.capability))
        return f"{asked} runs on compute capability {kernel.capability}, and this GPU has {had}; use {other}"
    where = " on CUDA" if device.type == "cuda" else ""
    able = " or ".join(f"precision.compute={each}" for each in formats)
    return f"{asked} does not compute in precision.compute={compute}{where}; use {able} or {other}"


_LOSS_CHUNK = 1024
"""Tokens of a chunk at most: enough for the weight's gradient to be more work than adding it up."""


def count_loss_chunks(num_tokens: float) -> int:
    """Parts that the chunked and the linear loss take one after the other of a microbatch of so many tokens."""
    return max(2, math.ceil(num_tokens / _LOSS_CHUNK))


_FASTEST = {
    "fa3": "made for this GPU, and its package is installed",
    "sdpa-flash": "PyTorch's FlashAttention-2",
    "sdpa-efficient": "the one fused kernel that computes in fp32 on CUDA",
    "sdpa-math": "the one kernel that computes in float64 on CUDA",
}
"""What attention's auto may stand for, and why; the fastest first."""
