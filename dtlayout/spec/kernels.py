"""Kernels: which implementation runs each operation that has several; docs/reference/kernels.md has the table."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from dtlayout.base.errors import InvalidConfig
from dtlayout.base.validators import one_of
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_table import (
    KERNELS,
    AttentionKernel,
    Kernel,
    KernelRequest,
    Package,
    find_kernel,
    list_kernels,
)
from dtlayout.spec.precision import Precision
from dtlayout.spec.recompute import Recompute

Compile = Literal["none", "blocks", "loss", "model"]
OpenCompile = Literal["auto", "none", "blocks", "loss", "model"]
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """A choice for each operation: the name of a record in `dtlayout.spec.kernel_table`."""

    attention: str = "sdpa-flash"
    """How scaled_dot_product_attention computes; sdpa-flash is PyTorch's FlashAttention-2 on CUDA, its own on CPU.
    flash1, megatron-softmax and torch can be predicted, not run."""
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
        _check_names(self)

    @property
    def compiles_blocks(self) -> bool:
        """Whether torch.compile fuses what is elementwise in a block."""
        return self.compile in ("blocks", "model")

    @property
    def records(self) -> list[Kernel]:
        """What is known of each of them."""
        return [KERNELS[name][value] for name, value in vars(self).items() if name != "compile"]

    def check(self, precision: Precision, device: Device, **asked: Any) -> None:
        """Raise InvalidConfig with all of `problems`, which says what may be asked."""
        if problems := self.problems(precision, device, **asked):
            raise InvalidConfig(problems)

    def problems(
        self, precision: Precision, device: Device, *, tp: int = 1, recompute: str = "none", in_parts: bool = False,
        document_mask: bool = False, splits_backward: bool = False, offloads_activations: bool = False,
    ) -> list[str]:  # fmt: skip
        """Every kernel that the trainer lacks, or lacks on this device, in this format or in such a layout.

        `in_parts` is `Layout.attends_in_parts`, beside which `document_mask` matters, and `splits_backward` that of
        the layout. What is not known of the device refuses nothing.
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
        problems += self._part_problems(precision, device) if in_parts else []
        if splits_backward and self.compile in ("blocks", "model"):
            problems.append(
                f"kernels.compile={self.compile} makes gradients of weights and of inputs at once, and the schedule "
                f"splits them; use kernels.compile=none or layout.schedule=1f1b"
            )
        if offloads_activations and self.compile == "model":
            problems.append(
                "kernels.compile=model makes one program of all blocks, between which layout.offload=activations "
                "copies what they keep; use kernels.compile=blocks or layout.offload=none"
            )
        return problems + (self._compile_problems(device, tp, recompute) if tp > 1 else [])

    def unrepeatable(self, device: Device) -> list[str]:
        """Every kernel that gives other bits each time where the run is; for train.deterministic."""
        return [
            f"{key}={kernel.name} gives other bits each time on CUDA, and train.deterministic=true asks for the same; "
            f"use {key}={getattr(Kernels(), kernel.operation)} or train.deterministic=false"
            for kernel in self.records
            if not kernel.is_repeatable and device.type != "cpu" and (device.type == "cuda" or not kernel.cpu)
            for key in [f"kernels.{kernel.operation}"]
        ]

    def _part_problems(self, precision: Precision, device: Device) -> list[str]:
        """Where the results of attention for parts of the keys cannot be joined."""
        if find_kernel(AttentionKernel, self.attention).partial:
            return []
        able = (each for each in list_kernels(AttentionKernel) if each.suits(device, precision.compute))
        own = (each for each in able if each.partial and each.package is None)
        other = min(own, key=lambda each: each.preference or math.inf).name
        return [
            f"kernels.attention={self.attention} gives no log-sum-exp of its scores on {device.type}, which this "
            f"layout.cp_method needs; use kernels.attention={other} or layout.cp_method=all-to-all"
        ]

    def _compile_problems(self, device: Device, tp: int, recompute: str) -> list[str]:
        """Where torch.compile fails on what tp splits."""
        repeated, attention = Recompute.parse(recompute), find_kernel(AttentionKernel, self.attention)
        is_inside = self.compile == "model" or (self.compile == "blocks" and repeated.is_selective)
        is_again = is_inside and repeated.every and "attention" not in repeated.kept
        if is_again and device.type == "cpu" and attention.backend and not attention.holds_scores:
            return [
                f"kernels.compile={self.compile} cannot keep the random state that layout.recompute={recompute} needs "
                f"to run kernels.attention={self.attention} again on a CPU beside the mesh of layout.tp={tp}; "
                f"use layout.recompute=selective or kernels.attention=blockwise"
            ]
        return []


class ResolvedKernels(NamedTuple):
    """What auto came to."""

    kernels: Kernels
    reasons: dict[str, str]
    """Key → why it is what it is; of those that were an auto."""

    def describe(self) -> list[str]:
        """A line for each auto."""
        return [f"{key} {getattr(self.kernels, key)}: {why}" for key, why in self.reasons.items()]


def _open(key: str, default: str) -> Any:
    return one_of(lambda: _list_names(OpenKernels, key), default)


@dataclass(frozen=True, kw_only=True)
class OpenKernels:
    """Kernels as TOML writes them, before the device is known: auto means the fastest there."""

    attention: str = _open("attention", AUTO)
    """`Kernels.attention`; auto for the fastest that will do."""
    norm: str = _open("norm", AUTO)
    """`Kernels.norm`; auto for the fastest that will do."""
    rope: str = _open("rope", AUTO)
    """`Kernels.rope`; auto for the fastest that will do."""
    swiglu: str = _open("swiglu", AUTO)
    """`Kernels.swiglu`; auto for the fastest that will do."""
    loss: str = _open("loss", Kernels.loss)
    """`Kernels.loss`: memory against time, which nobody else can weigh."""
    compile: OpenCompile = "auto"
    """`Kernels.compile`; auto for the blocks on CUDA, which they make faster, and for nothing on a CPU."""

    def __post_init__(self) -> None:
        _check_names(self)

    @classmethod
    def of(cls, kernels: Kernels) -> "OpenKernels":
        """Kernels that have no auto."""
        return cls(**vars(kernels))

    def resolve(self, need: KernelRequest) -> ResolvedKernels:
        """Each auto replaced by what is fastest where it is needed, and why it is that."""
        values: dict[str, Any] = dict(vars(self))
        reasons: dict[str, str] = {}
        if self.compile == AUTO:
            values["compile"], reasons["compile"] = _choose_compile(need)
        compiles = values["compile"] in ("blocks", "model")
        for key in (key for key, value in vars(self).items() if value == AUTO and key != "compile"):
            kernel = _choose_kernel(key, need, compiles=compiles)
            values[key] = kernel.name
            reasons[key] = "compile fuses it" if compiles and key != "attention" else kernel.reason
        return ResolvedKernels(Kernels(**values), {key: reasons[key] for key in vars(self) if key in reasons})

    def or_else(self, usual: Kernels) -> Kernels:
        """What is left at its default, an auto or what our trainer does, replaced by another choice."""
        said = {key: value for key, value in vars(self).items() if value != getattr(OpenKernels, key)}
        return replace(usual, **said)


def _choose_kernel(key: str, need: KernelRequest, *, compiles: bool) -> Kernel:
    """The first that will do; for documents one that takes offsets before all that hold a mask of S² numbers."""
    usable = [each for each in KERNELS[key].values() if each.will_do(need) and not (compiles and each.is_opaque)]

    def holds_mask(kernel: Kernel) -> bool:
        return need.document_mask and isinstance(kernel, AttentionKernel) and kernel.needs_mask(need.device.type)

    return min(usable, key=lambda kernel: (holds_mask(kernel), kernel.preference))


def _choose_compile(need: KernelRequest) -> tuple[Compile, str]:
    if need.device.type == "cpu":
        return "none", "a CPU gains little"
    if need.device.type != "cuda":
        return "none", "the device is not known"
    if need.splits_backward:
        return "none", "the schedule splits backwards, and what is compiled does not"
    if need.tp > 1 and need.recompute == "keep-matmuls":
        return "none", "keep-matmuls at tp > 1 has not been compiled on CUDA"
    return "blocks", "it fuses what is elementwise, and spares the host"


def _list_names(of: "type[Kernels | OpenKernels]", key: str) -> list[str]:
    """What a key may be: a kernel, or an auto where that is the default."""
    names = get_args(Compile) if key == "compile" else KERNELS[key]
    return [*([AUTO] if getattr(of, key) == AUTO else []), *names]


def _check_names(kernels: "Kernels | OpenKernels") -> None:
    """InvalidConfig for each value that a key may not be."""
    problems = []
    for name, value in vars(kernels).items():
        known = _list_names(type(kernels), name)
        if value not in known:
            problems.append(f"kernels.{name}={value!r} is unknown; use one of {known}")
    if problems:
        raise InvalidConfig(problems)


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
