"""Kernels: which implementation runs each operation that has several, and its rules; see docs/reference/kernels.md."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from dtlayout.base.refusals import Refusal, describe, refuse, show_value
from dtlayout.base.validators import one_of
from dtlayout.spec.device import Device
from dtlayout.spec.kernel_records import AttentionKernel, ExpertsKernel, Kernel, KernelRequest, Package
from dtlayout.spec.kernel_table import KERNELS, find_kernel, list_kernels
from dtlayout.spec.precision import BYTES, Format
from dtlayout.spec.recompute import Recompute

Compile = Literal["none", "blocks", "loss", "model"]
OpenCompile = Literal["auto", "none", "blocks", "loss", "model"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
RECORDED_MODES: tuple[CompileMode, ...] = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that record CUDA graphs."""
AUTO = "auto"
COMPILE_OPTIONS = ("compile_mode", "compile_fullgraph")
"""Keys that say how torch.compile does its work: no search varies them. Predictions ask for CUDA graphs alone."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """A kernel for each operation: the name of a record in `dtlayout.spec.kernel_table`."""

    attention: str = "sdpa-flash"
    """Attention. sdpa-flash is PyTorch's FlashAttention-2 on CUDA and its own flash kernel on a CPU. flash1,
    megatron-softmax and torch can be predicted, not run."""
    norm: str = "fused"
    """RMSNorm: separate operations (eager), one operation of PyTorch (fused), or liger-kernel's."""
    rope: str = "eager"
    """Rotary embedding: separate operations in fp32 (eager), or liger-kernel's."""
    swiglu: str = "eager"
    """silu(gate) · up: two operations (eager), or liger-kernel's."""
    loss: str = "chunked"
    """Cross-entropy. eager: of all logits at once, in fp32. chunked: of a chunk of the logits after another. linear:
    chunk after chunk together with the head's matmul, so that no more than a chunk of logits is ever there."""
    experts: str = "loop"
    """Matmuls of experts: one operation of PyTorch for all of them (grouped), or one matmul after the other (loop),
    which alone multiplies in `precision.matmuls`. Without effect in a model without experts."""
    compile: Compile = "none"
    """Parts that torch.compile compiles: each block by itself and the loss (blocks), the loss (loss), or a whole
    pipeline stage (model)."""
    compile_mode: CompileMode = "default"
    """`mode` of torch.compile. reduce-overhead and max-autotune record CUDA graphs, whose memory is not predicted. They
    are refused where sizes or addresses change from one microbatch to the next."""
    compile_fullgraph: bool = False
    """`fullgraph` of torch.compile: whether what would break the graph is an error, with its place and its reason."""

    def __post_init__(self) -> None:
        _check_names(self)

    @property
    def choices(self) -> dict[str, str]:
        """Key → value of each key that a search may vary and a prediction reads."""
        return _choices_of(self)

    @property
    def compiles_blocks(self) -> bool:
        """Whether torch.compile fuses what is elementwise in a block."""
        return self.compile in ("blocks", "model")

    @property
    def records_graphs(self) -> bool:
        """Whether CUDA graphs of compiled parts are recorded, whose kernels the host starts all at once."""
        return self.compile != "none" and self.compile_mode in RECORDED_MODES

    @property
    def records(self) -> list[Kernel]:
        """The record of each of them in the kernel table."""
        return [KERNELS[name][value] for name, value in self.choices.items() if name != "compile"]

    def used(self, request: KernelRequest) -> list[Kernel]:
        """The records of those whose operation the model has."""
        return [kernel for kernel in self.records if kernel.is_used(request)]

    def check(self, request: KernelRequest) -> None:
        """Raise InvalidConfig with all of `problems`, or return."""
        refuse(_find_broken(self, request))

    def problems(self, request: KernelRequest) -> list[str]:
        """A line for each kernel that the trainer does not have, or not where and how the request asks for it.

        A fact about the device that is not known refuses nothing.
        """
        return describe(_find_broken(self, request))


def _choices_of(kernels: "Kernels | OpenKernels") -> dict[str, str]:
    return {name: value for name, value in vars(kernels).items() if name not in COMPILE_OPTIONS}


def _find_broken(kernels: Kernels, request: KernelRequest) -> list[Refusal]:
    """A refusal for each rule that kernels break where they are asked for."""
    return [broken for rule in _RULES for broken in rule(kernels, request)]


def _check_device(kernels: Kernels, request: KernelRequest) -> Iterator[Refusal]:
    """Each kernel computes on this device in this format."""
    for kernel in kernels.used(request):
        if not kernel.suits(request.device, request.compute):
            yield _refuse_kernel(kernel, request)


def _check_packages(kernels: Kernels, request: KernelRequest) -> Iterator[Refusal]:
    """Packages of the kernels that suit the device are there."""
    missing = defaultdict[Package, list[str]](list)
    for kernel in kernels.used(request):
        if kernel.package and kernel.suits(request.device, request.compute) and kernel.is_missing(request.device):
            missing[kernel.package].append(f"kernels.{kernel.operation}={kernel.name}")
    for package, names in missing.items():
        what = f"{', '.join(names)}: no package {package.module} here"
        yield Refusal(f"package {package.module}", what, f"install it: {package.install}")


def _check_parts(kernels: Kernels, request: KernelRequest) -> Iterator[Refusal]:
    """Attention that is joined from parts is computed by a kernel that returns the log-sum-exp of its scores."""
    if not request.in_parts or find_kernel(AttentionKernel, kernels.attention).partial:
        return
    able = (each for each in list_kernels(AttentionKernel) if each.suits(request.device, request.compute))
    own = (each for each in able if each.partial and each.package is None)
    other = min(own, key=lambda each: each.preference or math.inf).name
    yield Refusal(
        "parts",
        f"kernels.attention={kernels.attention} gives no log-sum-exp of its scores on {request.device.type}, which "
        f"this layout.cp_method needs",
        f"use kernels.attention={other} or layout.cp_method=all-to-all",
    )


def _check_expert_widths(kernels: Kernels, request: KernelRequest) -> Iterator[Refusal]:
    """Rows of experts are as wide as their kernel computes."""
    kernel = find_kernel(ExpertsKernel, kernels.experts)
    odd = kernel.find_odd_widths(request)
    if odd and kernel.suits(request.device, request.compute):
        able = min((each for each in list_kernels(ExpertsKernel) if each.will_do(request)), key=lambda k: k.preference)
        what = " and ".join(f"{width * BYTES[request.compute]}" for width in odd)
        yield Refusal(
            "expert widths",
            f"kernels.experts={kernel.name} computes rows of a multiple of {kernel.row_bytes} bytes, and those of "
            f"experts have {what} in precision.compute={request.compute}",
            f"use kernels.experts={able.name}",
        )


def _check_split_backward(kernels: Kernels, request: KernelRequest) -> Iterator[Refusal]:
    """A schedule that splits backwards runs blocks that are not compiled."""
    if request.splits_backward and kernels.compiles_blocks:
        yield Refusal(
            "splits_backward",
            f"kernels.compile={kernels.compile} makes gradients of weights and of inputs at once, and the schedule "
            f"splits them",
            "use kernels.compile=none or layout.schedule=1f1b",
        )


def _check_experts_compiled(kernels: Kernels, request: KernelRequest) -> Iterator[Refusal]:
    """Counts of tokens break a graph, and inside a recomputation that keeps results nothing at all is compiled then."""
    keeps = Recompute.parse(request.recompute).is_selective
    if request.expert_widths and keeps and kernels.compiles_blocks:
        yield Refusal(
            "experts compiled",
            f"kernels.compile={kernels.compile} would compile nothing of a block with experts beside "
            f"layout.recompute={request.recompute}",
            "use kernels.compile=none, or layout.recompute=none or full",
        )


def _check_compile_options(kernels: Kernels, request: KernelRequest) -> Iterator[Refusal]:
    """Options of torch.compile stand beside something that is compiled, and a whole graph where there can be one."""
    if kernels.compile == "none":
        for key in COMPILE_OPTIONS:
            if (value := getattr(kernels, key)) != getattr(Kernels, key):
                said = f"kernels.{key}={show_value(value)} has no effect where kernels.compile=none"
                yield Refusal(key, said, f"use kernels.compile=blocks, or leave out kernels.{key}")
    if request.expert_widths and kernels.compile_fullgraph and kernels.compiles_blocks:
        yield Refusal(
            "compile_fullgraph",
            "kernels.compile_fullgraph=true: counts of tokens break the graph of a block with experts",
            "use kernels.compile_fullgraph=false",
        )


def _check_graphs(kernels: Kernels, request: KernelRequest) -> Iterator[Refusal]:
    """A CUDA graph repeats kernels with their sizes and addresses, and frees its memory when a forward begins anew.

    torch begins anew (inductor's `cudagraph_trees.py`) with the first compiled forward that follows any backward.
    """
    if not kernels.records_graphs:
        return
    said, otherwise = f"kernels.compile_mode={kernels.compile_mode}", "kernels.compile_mode=max-autotune-no-cudagraphs"
    if request.device.type == "cpu":
        if kernels.compile_mode == "reduce-overhead":  # the other one chooses kernels too
            yield Refusal("graphs on a CPU", f"{said} records CUDA graphs, and a CPU has none", f"use {otherwise}")
        return
    of_blocks = kernels.compiles_blocks
    attention = find_kernel(AttentionKernel, kernels.attention)
    repeats = kernels.compile == "blocks" and bool(Recompute.parse(request.recompute).every)
    broken = [
        (bool(request.expert_widths) and of_blocks, "experts get other numbers of rows each time", ""),
        (
            request.document_mask and of_blocks and not attention.needs_mask("cuda"),
            f"kernels.attention={attention.name} reads offsets of documents, which are more or fewer each time",
            " or kernels.attention=sdpa-cudnn",
        ),
        (
            request.is_pipelined,
            "a stage holds what several microbatches keep, and a graph frees it when the next forward follows a "
            "backward",
            " or layout.pp=1",
        ),
        (
            repeats,
            f"layout.recompute={request.recompute} runs forwards inside the backward, where they free the blocks' "
            f"inputs",
            " or layout.recompute=none",
        ),
        (
            request.offloads_activations and of_blocks,
            "what layout.offload=activations brings back lies at another address than the graph reads",
            " or layout.offload=none",
        ),
        (
            request.zero == 3 and of_blocks,
            "layout.zero=3 gathers weights into other memory each time, and a graph reads them where they were",
            " or layout.zero=2",
        ),
    ]
    for is_broken, why, instead in broken:
        if is_broken:
            yield Refusal("graphs", f"{said} records CUDA graphs: {why}", f"use {otherwise}{instead}")


def _check_offload(kernels: Kernels, request: KernelRequest) -> Iterator[Refusal]:
    """Activations that lie on the host are copied between blocks, which are no single program."""
    if request.offloads_activations and kernels.compile == "model":
        yield Refusal(
            "offload",
            "kernels.compile=model makes one program of all blocks, between which layout.offload=activations copies "
            "what they keep",
            "use kernels.compile=blocks or layout.offload=none",
        )


def _check_random_state(kernels: Kernels, request: KernelRequest) -> Iterator[Refusal]:
    """torch.compile keeps the random state for attention that runs again, which fails on a CPU beside tp."""
    if request.tp == 1 or request.device.type != "cpu":
        return
    repeated, attention = Recompute.parse(request.recompute), find_kernel(AttentionKernel, kernels.attention)
    is_inside = kernels.compile == "model" or (kernels.compile == "blocks" and repeated.is_selective)
    is_again = is_inside and repeated.every and "attention" not in repeated.kept
    if is_again and attention.backend and not attention.holds_scores:
        yield Refusal(
            "random state",
            f"kernels.compile={kernels.compile} cannot keep the random state that "
            f"layout.recompute={request.recompute} needs to run kernels.attention={kernels.attention} again on a CPU "
            f"beside the mesh of layout.tp={request.tp}",
            "use layout.recompute=selective or kernels.attention=blockwise",
        )


def _check_repeatable(kernels: Kernels, request: KernelRequest) -> Iterator[Refusal]:
    """A deterministic run has only kernels that return the same bits each time."""
    device = request.device
    if not request.deterministic or device.type == "cpu":
        return
    for kernel in kernels.used(request):
        if not kernel.is_repeatable and (device.type == "cuda" or not kernel.cpu):
            key = f"kernels.{kernel.operation}"
            yield Refusal(
                f"{key} repeats",
                f"{key}={kernel.name} gives other bits each time on CUDA, and train.deterministic=true asks for the "
                f"same",
                f"use {key}={getattr(Kernels(), kernel.operation)} or train.deterministic=false",
            )


_RULES: tuple[Callable[[Kernels, KernelRequest], Iterator[Refusal]], ...] = (
    _check_device, _check_packages, _check_parts, _check_expert_widths, _check_split_backward,
    _check_experts_compiled, _check_compile_options, _check_graphs, _check_offload,
    _check_random_state, _check_repeatable,
)  # fmt: skip


class ResolvedKernels(NamedTuple):
    """The kernels that stand in the place of every auto."""

    kernels: Kernels
    reasons: dict[str, str]
    """Key → the reason for the kernel, for each key that was an auto."""

    def describe(self) -> list[str]:
        """A line for each key that was an auto: its kernel, and why."""
        return [f"{key} {getattr(self.kernels, key)}: {why}" for key, why in self.reasons.items()]


def _open(key: str, default: str) -> Any:
    return one_of(lambda: _list_names(OpenKernels, key), default)


@dataclass(frozen=True, kw_only=True)
class OpenKernels:
    """A kernel for each operation, before the device is known: auto means the fastest there."""

    attention: str = _open("attention", AUTO)
    """`Kernels.attention`. auto: the fastest that will do."""
    norm: str = _open("norm", AUTO)
    """`Kernels.norm`. auto: the fastest that will do."""
    rope: str = _open("rope", AUTO)
    """`Kernels.rope`. auto: the fastest that will do."""
    swiglu: str = _open("swiglu", AUTO)
    """`Kernels.swiglu`. auto: the fastest that will do."""
    loss: str = _open("loss", Kernels.loss)
    """`Kernels.loss`. There is no auto, since only you can weigh memory against time."""
    experts: str = _open("experts", AUTO)
    """`Kernels.experts`. auto: the fastest that will do."""
    compile: OpenCompile = "auto"
    """`Kernels.compile`. auto: blocks on CUDA, where compiled blocks are faster, and none on a CPU."""
    compile_mode: CompileMode = "default"
    """`Kernels.compile_mode`."""
    compile_fullgraph: bool = False
    """`Kernels.compile_fullgraph`."""

    def __post_init__(self) -> None:
        _check_names(self)

    @classmethod
    def of(cls, kernels: Kernels) -> "OpenKernels":
        """A choice of these kernels, without an auto."""
        return cls(**vars(kernels))

    def resolve(self, request: KernelRequest) -> ResolvedKernels:
        """The kernels with each auto replaced by the fastest one for a request, and the reasons."""
        values: dict[str, Any] = dict(vars(self))
        reasons: dict[str, str] = {}
        if self.compile == AUTO:
            values["compile"], reasons["compile"] = _choose_compile(request)
        compiles = values["compile"] in ("blocks", "model")
        for key in (key for key, value in vars(self).items() if value == AUTO and key != "compile"):
            usual = KERNELS[key][getattr(Kernels(), key)]
            kernel = _choose_kernel(key, request, compiles=compiles) if usual.is_used(request) else usual
            values[key] = kernel.name
            if kernel.is_used(request):
                reasons[key] = "compile fuses it" if compiles and kernel.is_fusible else kernel.reason
        return ResolvedKernels(Kernels(**values), {key: reasons[key] for key in vars(self) if key in reasons})

    def or_else(self, usual: Kernels) -> Kernels:
        """The kernels in `usual`, but for keys that are set to another value than the default."""
        said = {key: value for key, value in vars(self).items() if value != getattr(OpenKernels, key)}
        return replace(usual, **said)


def _choose_kernel(key: str, request: KernelRequest, *, compiles: bool) -> Kernel:
    """The most preferred kernel that will do.

    For packed documents, kernels that take offsets go before kernels that hold a mask of S² numbers.
    """
    usable = [each for each in KERNELS[key].values() if each.will_do(request) and not (compiles and each.is_opaque)]

    def holds_mask(kernel: Kernel) -> bool:
        return request.document_mask and isinstance(kernel, AttentionKernel) and kernel.needs_mask(request.device.type)

    return min(usable, key=lambda kernel: (holds_mask(kernel), kernel.preference))


def _choose_compile(request: KernelRequest) -> tuple[Compile, str]:
    if request.device.type == "cpu":
        return "none", "a CPU gains little"
    if request.device.type != "cuda":
        return "none", "the device is not known"
    if request.splits_backward:
        return "none", "the schedule splits backwards, and what is compiled does not"
    if request.expert_widths and Recompute.parse(request.recompute).is_selective:
        return "none", "experts are not compiled beside a recomputation that keeps results"
    if request.tp > 1 and request.recompute == "keep-matmuls":
        return "none", "keep-matmuls at tp > 1 has not been compiled on CUDA"
    return "blocks", "it fuses what is elementwise, and spares the host"


_NO_KERNELS: dict[str, Sequence[Any]] = {
    "compile": get_args(Compile), "compile_mode": get_args(CompileMode), "compile_fullgraph": (False, True),
}  # fmt: skip
"""Key whose value names no kernel → its values."""


def _list_names(of: "type[Kernels | OpenKernels]", key: str) -> list[Any]:
    """Values that a key may have: the names of kernels, and auto where that is the default."""
    return [*([AUTO] if getattr(of, key) == AUTO else []), *(_NO_KERNELS.get(key) or KERNELS[key])]


def _is_known(key: str, value: Any) -> bool:
    return isinstance(value, str) and key in KERNELS and value in KERNELS[key]


def _check_names(kernels: "Kernels | OpenKernels") -> None:
    """InvalidConfig with a line for each key whose value is unknown."""
    of = type(kernels)
    refuse([
        Refusal(name, f"kernels.{name}={value!r} is unknown", f"use one of {_list_names(of, name)}")
        for name, value in vars(kernels).items()
        if not _is_known(name, value) and value not in _list_names(of, name)
    ])  # fmt: skip


def find_alternative(kernel: Kernel, compute: Format, device: Device) -> str:
    """Name of a kernel that could run there instead: the default, or else the first that needs no package."""
    known = KERNELS[kernel.operation]
    default = known[getattr(Kernels(), kernel.operation)]
    own = [each for each in (default, *known.values()) if each.package is None]
    return next(each.name for each in own if each.suits(device, compute))


def _refuse_kernel(kernel: Kernel, request: KernelRequest) -> Refusal:
    """The reason why a kernel does not suit a device, and a kernel that does."""
    key, compute, device = f"kernels.{kernel.operation}", request.compute, request.device
    asked, other = f"{key}={kernel.name}", f"use {key}={find_alternative(kernel, compute, device)}"
    formats = kernel.formats(device.type)
    if not kernel.formats():
        return Refusal(key, f"{asked} is a kernel of other engines that can only be predicted", other)
    if not formats:
        here, there = ("the CPU", "CUDA") if device.type == "cpu" else ("CUDA", "the CPU")
        return Refusal(key, f"{asked} runs on {there} alone", f"{other} on {here}")
    if kernel.is_for_others(device):
        had = ".".join(map(str, device.capability))
        able = " and ".join(map(str, kernel.capabilities)) or f"{kernel.oldest} and above"
        return Refusal(key, f"{asked} runs on compute capability {able}, and this GPU has {had}", other)
    where = " on CUDA" if device.type == "cuda" else ""
    able = " or ".join(f"precision.compute={each}" for each in formats)
    what = f"{asked} does not compute in precision.compute={compute}{where}"
    return Refusal(key, what, f"use {able} or {other.removeprefix('use ')}")


_LOSS_CHUNK = 1024
"""Most tokens of a chunk: enough for the weight's gradient to be more work to compute than to add up."""


def count_loss_chunks(num_tokens: float) -> int:
    """Chunks into which the chunked and the linear loss cut a microbatch of so many tokens."""
    return max(2, math.ceil(num_tokens / _LOSS_CHUNK))
