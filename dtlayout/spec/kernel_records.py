"""Kernel: one record for each choice of `[kernels]`, and what a run asks of it.

A record is all that checks, predictions, dry runs and the trainer know of a kernel. No torch: `Kernel.load` imports the
function of a kernel when a model is built. The records themselves stand in spec/kernel_table.py.

Legend: B batch, H query heads, G key-value heads, S sequence, K head width, T tokens, D model width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from typing_extensions import Self

from dtlayout.base.errors import InvalidConfig
from dtlayout.spec.device import Device, DeviceType
from dtlayout.spec.layout_keys import LayoutKeys
from dtlayout.spec.model_shape import ModelShape
from dtlayout.spec.precision import BYTES, Format

EVERY_FORMAT: tuple[Format, ...] = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Package:
    """A package that is installed by choice."""

    module: str
    """Name of the module that is imported."""
    install: str
    """Command that installs it."""


@dataclass(frozen=True, kw_only=True)
class KernelRequest:
    """Everything about a run that decides which kernels can run it, and which of them auto takes.

    Where a fact about the device is not known, auto takes no kernel that needs it, and no kernel is refused for it.
    """

    device: Device
    compute: Format
    """Number format of forward and backward."""
    head_width: int = 0
    """Width of an attention head, by which auto chooses; 0 where there is no auto."""
    tp: int = 1
    """Degree of tensor parallelism."""
    recompute: str = "none"
    """Kind of recomputation, as in `Layout.recompute`."""
    deterministic: bool = False
    """Whether each step has to give the same bits again."""
    document_mask: bool = False
    """Whether packed documents do not see each other."""
    in_parts: bool = False
    """Whether attention is joined from parts, `Layout.attends_in_parts`."""
    splits_backward: bool = False
    """Whether gradients of weights come apart from those of inputs, `Layout.splits_backward`."""
    offloads_activations: bool = False
    """Whether what blocks keep lies on the host, `Layout.offloads_activations`."""
    is_pipelined: bool = False
    """Whether blocks are cut into stages, `Layout.is_pipelined`."""
    zero: int = 1
    """ZeRO stage, as in `Layout.zero`."""
    expert_widths: tuple[int, ...] = ()
    """Widths of the rows that experts read and make; empty where a model has no experts."""
    is_traced: bool = False
    """Whether blocks are the code of transformers, of a traced model."""

    @classmethod
    def of(
        cls,
        device: Device,
        model: ModelShape,
        compute: Format,
        layout: LayoutKeys,
        *,
        document_mask: bool,
        deterministic: bool = False,
    ) -> Self:
        """Everything that a model in a layout asks of kernels on a device."""
        experts = model.experts
        return cls(
            device=device,
            compute=compute,
            head_width=model.head_width,
            tp=layout.tp,
            recompute=layout.recompute,
            deterministic=deterministic,
            document_mask=document_mask,
            in_parts=layout.attends_in_parts,
            splits_backward=layout.splits_backward,
            offloads_activations=layout.offloads_activations,
            is_pipelined=layout.is_pipelined,
            zero=layout.zero,
            expert_widths=(model.hidden_size, experts.ffn_size) if experts else (),
            is_traced=bool(model.trace),
        )


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One implementation of an operation."""

    operation: ClassVar[str]
    """The key of `[kernels]`."""
    is_priced: ClassVar[bool] = True
    """Whether predictions tell the kernels of the operation apart."""
    is_fusible: ClassVar[bool] = False
    """Whether torch.compile fuses the operation, whichever kernel it has."""
    is_of_described: ClassVar[bool] = False
    """Whether blocks that are described call it alone; those that were traced have code of their own."""
    name: str
    """The value of that key."""
    cpu: tuple[Format, ...] = EVERY_FORMAT
    """Number formats in which it computes on a CPU; empty if it does not run there."""
    cuda: tuple[Format, ...] = EVERY_FORMAT
    """Number formats in which it computes on CUDA. A kernel with no format on any device can only be predicted."""
    capabilities: tuple[int, ...] = ()
    """First numbers of the compute capabilities on which it runs; empty for all GPUs."""
    oldest: int = 0
    """First number of the oldest compute capability on which it runs; 0 for all GPUs."""
    package: Package | None = None
    """Package that the kernel needs beside torch."""
    function: str | Callable[..., Any] = ""
    """Function that computes it, or "module:name" of one; the class of the operation says its arguments."""
    is_searched: bool = False
    """Whether a search compares it with other kernels, unless the user fixes one."""
    is_repeatable: bool = True
    """Whether it gives the same bits each time on CUDA, at least where torch is told to be deterministic."""
    preference: int = 0
    """Place among the kernels that auto may take, from 1 on; the first that will do is taken. 0: it is never taken."""
    reason: str = ""
    """Reason why auto takes it, for a run's log."""
    is_opaque: bool = False
    """Whether torch.compile cannot look into it; a compiled block fuses it with nothing."""
    traces: tuple[str, ...] = ()
    """Patterns of the names that torch's profiler gives its forward; empty if no name is the kernel's alone."""

    def formats(self, device_type: str = "auto") -> tuple[Format, ...]:
        """Number formats in which it computes on such a device; for auto, those on any device."""
        if device_type == "auto":
            return tuple(dict.fromkeys((*self.cpu, *self.cuda)))
        return self.cpu if device_type == "cpu" else self.cuda

    def is_used(self, request: KernelRequest) -> bool:
        """Whether the model has the operation; a kernel of one that it lacks is neither chosen nor refused."""
        return not (request.is_traced and self.is_of_described)

    def suits(self, device: Device, compute: Format) -> bool:
        """Whether it runs on a device in a format, as far as the device is known; its package may be missing."""
        return compute in self.formats(device.type) and not self.is_for_others(device)

    def is_for_others(self, device: Device) -> bool:
        """Whether it is made for another generation of GPUs than that of the device, if this is known."""
        had = device.capability[0] if device.capability else 0  # 0 where it is not known
        is_made_for = not self.capabilities or had in self.capabilities
        return bool(device.capability) and (not is_made_for or 0 < had < self.oldest)

    def is_missing(self, device: Device) -> bool:
        """Whether its package is known to be missing on the device."""
        return self.package is not None and device.packages is not None and self.package.module not in device.packages

    def will_do(self, request: KernelRequest) -> bool:
        """Whether auto may take it: it surely runs on the device, and fulfils the request."""
        device = request.device
        known = replace(device, capability=device.capability or (0, 0), packages=device.packages or frozenset())
        formats = {*self.cpu} & {*self.cuda} if known.type == "auto" else self.formats(known.type)
        runs = request.compute in formats and not self.is_for_others(known) and not self.is_missing(known)
        repeats = self.is_repeatable or not request.deterministic or known.type == "cpu"
        return self.preference > 0 and runs and repeats

    def load(self) -> Callable[..., Any]:
        """The function that computes it, imported."""
        import pkgutil  # only now: what predicts and checks loads none

        return pkgutil.resolve_name(self.function) if isinstance(self.function, str) else self.function


@dataclass(frozen=True, kw_only=True)
class AttentionKernel(Kernel):
    """Causal attention: q [B, H, S, K], k and v [B, G, S, K] and a mask or None → [B, H, S, K].

    With packed documents the mask is added to the scores, [B, 1, S, S], and holds causality too, or it is what
    `offsets` says.
    """

    operation = "attention"
    backend: str = ""
    """Member of torch's SDPBackend that computes it; empty if `function` does."""
    flash: str = ""
    """Flash implementation that torch has to use while this kernel runs; empty for torch's own."""
    offsets: tuple[DeviceType, ...] = ()
    """Devices on which packed documents come as offsets, [N + 1] into the row of all tokens, and not as a mask."""
    partial: str = ""
    """Place, "module:name", of a `Partial` of ops/partial.py. It attends to a part of the keys, and also returns the
    log-sum-exp of the scores. Without one, cp can only split the heads."""
    operators: tuple[str, ...] = ()
    """Operators whose results selective recomputation keeps."""
    efficiency: str = ""
    """Name of the constant of the cost model (`Constants`) for the share of the peak that it reaches. Without one, the
    kernel holds scores, and counts as matmuls and passes over the scores."""
    traffic: str = ""
    """Name of the constant for the bytes that it moves for each score in forward."""
    saved: str = ""
    """Name of the constant for the bytes that it keeps beside q, k, v and its output: bytes for each score if it holds
    scores; else for each token and unit of width, beside a number for each row of scores."""
    copies_exactly: bool = False
    """Whether it keeps q, k, v and its scores in fp32 or finer, with keys and values for every query head."""
    widest_head: int | None = None
    """Width of the widest head that it computes on CUDA; None for any width."""
    head_multiple: int = 1
    """Number of which the width of a head must be a multiple on CUDA."""
    preferred_on: tuple[int, ...] = ()
    """First numbers of the compute capabilities on which auto may take it; empty for all on which it runs."""
    repeats_heads: bool = False
    """Whether keys and values are repeated for every query head before it gets them."""
    keeps_mask: bool = True
    """Whether its backward reads the mask."""

    def __post_init__(self) -> None:
        if bool(self.efficiency) == bool(self.traffic):
            raise InvalidConfig(
                f"kernels.attention={self.name} needs one constant that prices it; "
                f"name efficiency, or traffic where it holds scores"
            )

    @property
    def holds_scores(self) -> bool:
        """Whether it holds the S² scores of each head in memory."""
        return not self.efficiency

    def will_do(self, request: KernelRequest) -> bool:
        """Whether auto may take it: it also computes heads of this width, and is known to be fast on this GPU."""
        width, on_cpu = request.head_width, request.device.type == "cpu"
        fits = on_cpu or (width <= (self.widest_head or width) and width % self.head_multiple == 0)
        is_fast = not self.preferred_on or request.device.capability[:1] in [(each,) for each in self.preferred_on]
        joins = not request.in_parts or bool(self.partial)
        return super().will_do(request) and fits and is_fast and joins

    def needs_mask(self, device_type: str) -> bool:
        """Whether it keeps packed documents apart by a mask of S² numbers for each sample, and not by offsets."""
        return device_type not in self.offsets


@dataclass(frozen=True, kw_only=True)
class NormKernel(Kernel):
    """RMSNorm: x [..., D], its weight [D] and eps → [..., D]; on CUDA it may be computed with x a shard of S."""

    operation = "norm"
    is_fusible = is_of_described = True
    separate: tuple[DeviceType, ...] = ()
    """Devices on which it is several operations, each of which writes its result to memory."""
    keeps_exact: bool = False
    """Whether it keeps input · scale in fp32 or finer, where it is separate operations."""

    @property
    def is_eager(self) -> bool:
        """Whether it is several operations on CUDA too; the cost model has constants for that."""
        return "cuda" in self.separate


@dataclass(frozen=True, kw_only=True)
class RopeKernel(Kernel):
    """Rotary embedding: q [B, H, S, K], k [B, G, S, K] and tables cos and sin of S or more positions → both rotated."""

    operation = "rope"
    is_fusible = is_of_described = True
    is_fused: bool = True
    """Whether it reads and writes its tensors once."""


@dataclass(frozen=True, kw_only=True)
class SwigluKernel(Kernel):
    """silu(gate) · up: two tensors of the FFN's width → one."""

    operation = "swiglu"
    is_fusible = is_of_described = True
    num_kept: Literal[3, 4] = 3
    """Number of tensors that it keeps for backward: gate, up and the product; and silu(gate), unless backward computes
    it again."""


@dataclass(frozen=True, kw_only=True)
class LossKernel(Kernel):
    """Head and cross-entropy: hidden states [T, D], weight [V, D], targets [T], the `Head` and the scale → a scalar."""

    operation = "loss"
    in_chunks: bool = True
    """Whether the softmax in the exact format is in memory for one chunk of tokens at a time."""
    num_exact: int = 1
    """Number of tensors in the exact format, as large as the logits of a chunk, that are in memory at once. 1: the
    gradient takes the place of the softmax."""
    joins_matmul: bool = False
    """Whether the logits too are in memory for one chunk at a time. The gradients of hidden states and weight are then
    computed in forward."""


@dataclass(frozen=True, kw_only=True)
class ExpertsKernel(Kernel):
    """Matmuls of a mixture's experts; its function is a `GroupedMatmul` of ops/grouped.py."""

    operation = "experts"
    is_priced = False
    row_bytes: int = 1
    """Number of bytes of which each row must be a multiple."""
    scales: bool = False
    """Whether it multiplies in `precision.matmuls` where that is fp8; else in the compute format."""
    single_on: tuple[int, ...] = ()
    """First numbers of the compute capability of the GPUs on which one kernel computes all experts; empty if it does so
    on none."""

    def is_used(self, request: KernelRequest) -> bool:
        """Whether the model has experts."""
        return bool(request.expert_widths)

    def will_do(self, request: KernelRequest) -> bool:
        """Whether auto may take it: it also computes rows of these widths, and is not known to go one by one here."""
        is_fast = not self.single_on or not self.is_one_by_one_on(request.device.capability)
        return super().will_do(request) and is_fast and not self.find_odd_widths(request)

    def is_one_by_one_on(self, capability: tuple[int, ...]) -> bool:
        """Whether the host starts kernels for each expert, once it has read how many rows each has.

        A CPU and a GPU that is not known have no `capability`, and count as one with a single kernel if there is any.
        """
        return not self.single_on or (bool(capability) and capability[0] not in self.single_on)

    def find_odd_widths(self, request: KernelRequest) -> list[int]:
        """Widths of rows, in numbers, that it does not compute."""
        return [width for width in request.expert_widths if width * BYTES[request.compute] % self.row_bytes]
